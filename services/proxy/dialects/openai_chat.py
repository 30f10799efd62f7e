"""OpenAI Chat Completions, as its public reference describes it: streaming and not, tools, usage, errors.

Invariant: a reply's tool calls are written after the call is recorded; the arguments of a tool call are the exact text
that the policy generated, malformed or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

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
    event,
    format_instruction,
    json_text,
    optional_count,
    optional_flag,
    optional_number,
    with_instruction,
)

name = "openai_chat"
list_key = "messages"

_ERROR_TYPES = {
    "unauthorized": ("invalid_request_error", "invalid_api_key"),
    "gone": ("invalid_request_error", "execution_finished"),
    "not_found": ("invalid_request_error", "not_found"),
    "context_too_long": ("invalid_request_error", "context_length_exceeded"),
    "unavailable": ("server_error", "service_unavailable"),
    "internal": ("server_error", "internal_error"),
}


def parse(body: Any, headers: Mapping[str, str], known: Conversation | None = None) -> Request:
    body = as_object(body, "the request body")
    if body.get("n") not in (None, 1):
        raise bad_request("n must be 1: one call gives one choice")
    entries = as_list(body.get("messages"), "messages")
    tools = _tools(body)
    options = body.get("stream_options")
    usage = optional_flag(as_object(options, "stream_options"), "include_usage") if options is not None else False
    wanted = format_instruction(body.get("response_format"), "response_format")
    conversation = known or Conversation()
    for i, entry in enumerate(entries, len(conversation.ends)):
        conversation.add((_message(entry, f"messages[{i}]"),))
    limits = (optional_count(body, "max_completion_tokens"), optional_count(body, "max_tokens"))
    return Request(
        dialect=name,
        model=as_text(body.get("model", ""), "model"),
        messages=with_instruction(check_conversation(conversation.ordered()), wanted),
        tools=tools,
        stream=optional_flag(body, "stream"),
        include_usage=usage,
        max_tokens=next((n for n in limits if n is not None), None),
        temperature=optional_number(body, "temperature", 0, 2),
        top_p=optional_number(body, "top_p", 0, 1),
        stop=_stop(body.get("stop")),
        tool_choice=check_tool_choice(_tool_choice(body.get("tool_choice")), tools),
        headers=headers,
    )


def _message(value: Any, where: str) -> Message:
    value = as_object(value, where)
    role = value.get("role")
    content = _content(value.get("content"), f"{where}.content")
    if role in ("system", "developer"):
        return Message("system", content)
    if role == "user":
        return Message("user", content)
    if role in ("tool", "function"):
        call = value.get("tool_call_id") if role == "tool" else value.get("name")
        return Message("tool", content, tool_call_id=as_text(call, f"{where}.tool_call_id"))
    if role == "assistant":
        calls = as_list(value.get("tool_calls") or [], f"{where}.tool_calls")
        reasoning = value.get("reasoning_content") or value.get("reasoning") or ""
        return Message(
            "assistant",
            content,
            reasoning if isinstance(reasoning, str) else "",
            tuple(_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)),
        )
    raise bad_request(f"{where}.role is {role!r}: use system, developer, user, assistant or tool"[:300])


def _content(content: Any, where: str) -> str:
    """A string, null, or a list of text parts, as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(as_list(content, where)):
        part = as_object(part, f"{where}[{i}]")
        kind = part.get("type")
        if kind not in ("text", "refusal", "input_text", "output_text"):
            raise bad_request(f"{where}[{i}] is of type {kind!r}: this model reads text only"[:300])
        texts.append(as_text(part.get("refusal" if kind == "refusal" else "text"), f"{where}[{i}].text"))
    return "".join(texts)


def _tool_call(value: Any, where: str) -> ToolCall:
    value = as_object(value, where)
    function = as_object(value.get("function"), f"{where}.function")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        arguments = json_text(arguments)
    return ToolCall(
        as_text(value.get("id", ""), f"{where}.id"),
        as_text(function.get("name"), f"{where}.function.name"),
        arguments,
    )


def _tools(body: dict[str, Any]) -> tuple[Tool, ...]:
    tools = []
    for i, value in enumerate(as_list(body.get("tools") or [], "tools")):
        value = as_object(value, f"tools[{i}]")
        if value.get("type") != "function":
            raise bad_request(f"tools[{i}].type is {value.get('type')!r}: only function tools are served"[:300])
        function = as_object(value.get("function"), f"tools[{i}].function")
        tools.append(
            Tool(
                as_text(function.get("name"), f"tools[{i}].function.name"),
                as_text(function.get("description") or "", f"tools[{i}].function.description"),
                as_object(function.get("parameters") or {}, f"tools[{i}].function.parameters"),
            )
        )
    return tuple(tools)


def _tool_choice(value: Any) -> str:
    if value is None:
        return "auto"
    if isinstance(value, str):
        return value
    function = as_object(as_object(value, "tool_choice").get("function"), "tool_choice.function")
    return as_text(function.get("name"), "tool_choice.function.name")


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else as_list(value, "stop")
    return tuple(as_text(v, "stop") for v in values if v != "")


# --------------------------------------------------------------------------------------------------------- replies


def reply(request: Request, reply: Reply) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": reply.message.text or None}
    if not reply.message.tool_calls and message["content"] is None:
        message["content"] = ""
    if reply.message.reasoning:
        message["reasoning_content"] = reply.message.reasoning
    if reply.message.tool_calls:
        message["tool_calls"] = [_wire_call(c) for c in reply.message.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
    head = _head("chat.completion", reply.call, reply.created, reply.model)
    return orjson.dumps({**head, "choices": [choice], "usage": _usage(reply)})


def error(error: ApiError) -> bytes:
    return orjson.dumps({"error": _error(error)})


def stream(request: Request, call: str, created: int) -> _Stream:
    return _Stream(request, call, created)


class _Stream:
    """Chunks of one streamed completion."""

    def __init__(self, request: Request, call: str, created: int) -> None:
        self._usage = request.include_usage
        self._head = _head("chat.completion.chunk", call, created, request.model)
        self._sent = 0  # characters of the text

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, delta: str) -> bytes:
        self._sent += len(delta)
        return self._chunk({"content": delta})

    def keep_alive(self) -> bytes:
        return self._chunk({"content": ""})

    def reply(self, reply: Reply) -> bytes:
        parts = []
        if reply.message.reasoning:
            parts.append(self._chunk({"reasoning_content": reply.message.reasoning}))
        if rest := reply.message.text[self._sent :]:
            parts.append(self._chunk({"content": rest}))
        for i, call in enumerate(reply.message.tool_calls):
            wire = _wire_call(call)
            opening = {**wire, "index": i, "function": {"name": call.name, "arguments": ""}}
            parts.append(self._chunk({"tool_calls": [opening]}))
            parts.append(self._chunk({"tool_calls": [{"index": i, "function": {"arguments": call.arguments}}]}))
        parts.append(self._chunk({}, reply.finish))
        if self._usage:
            parts.append(event({**self._head, "choices": [], "usage": _usage(reply)}))
        return b"".join(parts) + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return event({"error": _error(error)})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        extra = {"usage": None} if self._usage else {}
        return event({**self._head, "choices": [choice], **extra})


def _head(kind: str, call: str, created: int, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{call}", "object": kind, "created": created, "model": model}


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def _error(error: ApiError) -> dict[str, Any]:
    kind, code = _ERROR_TYPES.get(error.kind, ("invalid_request_error", None))
    message = error.message
    if error.kind == "context_too_long":
        message = (
            f"This model's maximum context length is {error.maximum} tokens. However, your messages resulted in "
            f"{error.tokens} tokens. Please reduce the length of the messages."
        )
    return {"message": message, "type": kind, "param": None, "code": code}
