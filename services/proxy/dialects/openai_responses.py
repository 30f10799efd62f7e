"""OpenAI Responses, as its public reference describes it: streaming and not, tools, reasoning items, errors.

Invariant: nothing is kept for a later request: the whole conversation comes with each one (`previous_response_id` and
item references are refused). The arguments of a function call are the exact text that the policy generated. Tools
that the server itself would have to run (web search and the like) are left out: the policy never sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from services.proxy.dialects import openai_chat
from services.proxy.dialects.base import (
    ApiError,
    Conversation,
    Message,
    Reply,
    Request,
    Tool,
    ToolCall,
    as_list,
    as_object,
    as_text,
    bad_request,
    check_conversation,
    check_tool_choice,
    format_instruction,
    json_text,
    optional_count,
    optional_flag,
    optional_number,
    with_instruction,
)
from services.proxy.dialects.responses_stream import Stream, answer

name = "openai_responses"
list_key = "input"
errors_in_stream = ("context_too_long",)
"""Kinds of errors that this API tells inside a stream, where harnesses look for them."""

CUSTOM, NAMESPACE = "custom", "namespace:"
_TEXT_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def parse(body: Any, headers: Mapping[str, str], known: Conversation | None = None) -> Request:
    body = as_object(body, "the request body")
    for key in ("previous_response_id", "conversation"):
        if body.get(key) is not None:
            raise bad_request(f"{key}: this server keeps no responses; send the whole conversation as input")
    tools, kinds = _tools(body)
    text = as_object(body.get("text") or {}, "text")
    messages = check_conversation(_input(body.get("input"), known or Conversation()))
    instructions = body.get("instructions")
    if instructions:
        messages = (Message("system", as_text(instructions, "instructions")), *messages)
    return Request(
        dialect=name,
        model=as_text(body.get("model", ""), "model"),
        messages=with_instruction(messages, format_instruction(text.get("format"), "text.format")),
        tools=tools,
        stream=optional_flag(body, "stream"),
        max_tokens=optional_count(body, "max_output_tokens"),
        temperature=optional_number(body, "temperature", 0, 2),
        top_p=optional_number(body, "top_p", 0, 1),
        tool_choice=check_tool_choice(_tool_choice(body.get("tool_choice")), tools),
        headers=headers,
        custom_tools=kinds,
    )


# ----------------------------------------------------------------------------------------------------------- input


def _input(value: Any, conversation: Conversation) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message("user", value),)
    turn = _Turns(conversation)
    for i, item in enumerate(as_list(value, "input"), len(conversation.ends)):
        _item(turn, as_object(item, f"input[{i}]"), f"input[{i}]")
        turn.entry_ends()
    return turn.done()


class _Turns:
    """Items in order; those that one turn of the policy consists of become one message again."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._messages: list[Message] = []  # whole ones of the entry at hand
        self._text: str | None = None
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, message: Message) -> None:
        self._close()
        self._messages.append(message)

    def reasoning(self, text: str) -> None:
        if self._text is not None or self._calls:
            self._close()
        self._reasoning.append(text)

    def said(self, text: str) -> None:
        if self._text is not None or self._calls:
            self._close()
        self._text = text

    def call(self, call: ToolCall) -> None:
        self._calls.append(call)

    def entry_ends(self) -> None:
        begun = self._text is not None or bool(self._reasoning) or bool(self._calls)
        self._conversation.add(self._messages, open_end=begun)
        self._messages = []

    def done(self) -> tuple[Message, ...]:
        self._close()
        self._conversation.messages.extend(self._messages)
        return self._conversation.ordered()

    def _close(self) -> None:
        if self._text is not None or self._calls:
            reasoning = "\n".join(t for t in self._reasoning if t)
            self._messages.append(Message("assistant", self._text or "", reasoning, tuple(self._calls)))
        self._text, self._reasoning, self._calls = None, [], []


def _item(turn: _Turns, item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _message(turn, item, where)
    elif kind == "reasoning":
        turn.reasoning(_reasoning(item, where))
    elif kind == "function_call":
        arguments = as_text(item.get("arguments") or "", f"{where}.arguments")
        turn.call(ToolCall(*_names(item, where), arguments))
    elif kind == "custom_tool_call":
        text = as_text(item.get("input") or "", f"{where}.input")
        turn.call(ToolCall(*_names(item, where), json_text({"input": text})))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = _text(item.get("output"), f"{where}.output")
        turn.add(Message("tool", text, tool_call_id=as_text(item.get("call_id"), f"{where}.call_id")))
    else:
        raise bad_request(f"{where} is of type {kind!r}, which is not served here"[:300])


def _message(turn: _Turns, item: dict[str, Any], where: str) -> None:
    role, text = item.get("role"), _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        turn.said(text)
    elif role in ("system", "developer"):
        turn.add(Message("system", text))
    elif role == "user":
        turn.add(Message("user", text))
    else:
        raise bad_request(f"{where}.role is {role!r}: use user, assistant, system or developer"[:300])


def _names(item: dict[str, Any], where: str) -> tuple[str, str]:
    return as_text(item.get("call_id"), f"{where}.call_id"), as_text(item.get("name"), f"{where}.name")


def _reasoning(item: dict[str, Any], where: str) -> str:
    texts = []
    for key in ("content", "summary"):
        for i, part in enumerate(as_list(item.get(key) or [], f"{where}.{key}")):
            text = as_object(part, f"{where}.{key}[{i}]").get("text")
            texts.append(as_text(text if text is not None else "", f"{where}.{key}[{i}].text"))
        if texts:
            break
    return "\n".join(texts)


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(as_list(content, where)):
        part = as_object(part, f"{where}[{i}]")
        kind = part.get("type")
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise bad_request(f"{where}[{i}] is of type {kind!r}: this model reads text only"[:300])
        texts.append(as_text(part.get("refusal" if kind == "refusal" else "text"), f"{where}[{i}].text"))
    return "".join(texts)


# ----------------------------------------------------------------------------------------------------------- tools


def _tools(body: dict[str, Any]) -> tuple[tuple[Tool, ...], dict[str, str]]:
    tools: list[Tool] = []
    kinds: dict[str, str] = {}
    for i, value in enumerate(as_list(body.get("tools") or [], "tools")):
        _add_tool(as_object(value, f"tools[{i}]"), f"tools[{i}]", "", tools, kinds)
    return tuple(tools), kinds


def _add_tool(value: dict[str, Any], where: str, namespace: str, tools: list[Tool], kinds: dict[str, str]) -> None:
    kind = value.get("type")
    if kind == "namespace":
        inner = as_list(value.get("tools") or [], f"{where}.tools")
        for i, one in enumerate(inner):
            at = f"{where}.tools[{i}]"
            _add_tool(as_object(one, at), at, as_text(value.get("name"), f"{where}.name"), tools, kinds)
    elif kind in ("function", "custom"):
        tool = as_text(value.get("name"), f"{where}.name")
        description = as_text(value.get("description") or "", f"{where}.description")
        given = as_object(value.get("parameters") or {}, f"{where}.parameters")
        tools.append(Tool(tool, description, _TEXT_INPUT if kind == "custom" else given))
        if kind == "custom":
            kinds[tool] = CUSTOM
        elif namespace:
            kinds[tool] = NAMESPACE + namespace
    elif not isinstance(kind, str):
        raise bad_request(f"{where}.type must be a string")


def _tool_choice(value: Any) -> str:
    if value is None:
        return "auto"
    if isinstance(value, str):
        return value
    value = as_object(value, "tool_choice")
    if value.get("type") in ("function", "custom"):
        return as_text(value.get("name"), "tool_choice.name")
    if value.get("type") == "allowed_tools":
        return "required" if value.get("mode") == "required" else "auto"
    raise bad_request(f"tool_choice.type is {value.get('type')!r}: only function and custom tools can be named"[:300])


# --------------------------------------------------------------------------------------------------------- replies


def reply(request: Request, reply: Reply) -> bytes:
    return orjson.dumps(answer(request, reply))


def error(error: ApiError) -> bytes:
    return openai_chat.error(error)


def stream(request: Request, call: str, created: int) -> Stream:
    return Stream(request, call, created)
