"""Anthropic Messages, as its public reference describes it: streaming and not, tools, thinking, token counts, errors.

Invariant: a reply's tool calls are written after the call is recorded. Tool input must be an object on this wire, so
what the policy generated as malformed arguments reaches the harness as {"malformed_arguments": text}; the record keeps
the tokens.
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

name = "anthropic"
list_key = "messages"

_ERROR_TYPES = {
    "unauthorized": "authentication_error",
    "gone": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "unavailable": "overloaded_error",
    "internal": "api_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def parse(
    body: Any, headers: Mapping[str, str], known: Conversation | None = None, *, counting: bool = False
) -> Request:
    body = as_object(body, "the request body")
    max_tokens = optional_count(body, "max_tokens")
    if max_tokens is None and not counting:
        raise bad_request("max_tokens: Field required")
    tools = _tools(body)
    system = _text(body.get("system") or "", "system")
    before = (Message("system", system),) if system else ()
    conversation = known or Conversation()
    for i, value in enumerate(as_list(body.get("messages"), "messages"), len(conversation.ends)):
        conversation.add(_messages(value, f"messages.{i}"))
    messages = check_conversation(before + conversation.ordered())
    return Request(
        dialect=name,
        model=as_text(body.get("model", ""), "model"),
        messages=with_instruction(messages, _wanted_format(body)),
        tools=tools,
        stream=optional_flag(body, "stream"),
        max_tokens=max_tokens,
        temperature=optional_number(body, "temperature", 0, 1),
        top_p=optional_number(body, "top_p", 0, 1),
        stop=tuple(as_text(s, "stop_sequences") for s in as_list(body.get("stop_sequences") or [], "stop_sequences")),
        tool_choice=check_tool_choice(_tool_choice(body.get("tool_choice")), tools),
        headers=headers,
    )


def _wanted_format(body: dict[str, Any]) -> str:
    """Structured output: output_config.format, or the older output_format."""
    config = as_object(body.get("output_config") or {}, "output_config")
    if config.get("format") is not None:
        return format_instruction(config["format"], "output_config.format")
    return format_instruction(body.get("output_format"), "output_format")


def _messages(value: Any, where: str) -> list[Message]:
    """One wire message; tool results inside a user message become messages of their own, before its text."""
    value = as_object(value, where)
    role, content = value.get("role"), value.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role: use user or assistant, not {role!r}"[:300])
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else as_list(content, f"{where}.content")
    if role == "assistant":
        return [_assistant(blocks, where)]
    results, texts = [], []
    for i, block in enumerate(blocks):
        at = f"{where}.content.{i}"
        block = as_object(block, at)
        if block.get("type") == "tool_result":
            text = _text(block.get("content") or "", f"{at}.content")
            results.append(Message("tool", text, tool_call_id=as_text(block.get("tool_use_id"), f"{at}.tool_use_id")))
        else:
            texts.append(_block_text(block, at))
    if texts or not results:
        results.append(Message(role, "\n".join(texts)))
    return results


def _assistant(blocks: list[Any], where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        at = f"{where}.content.{i}"
        block = as_object(block, at)
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_tool_call(block, at))
        elif kind == "thinking":
            thoughts.append(as_text(block.get("thinking"), f"{at}.thinking"))
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, at))
    return Message("assistant", "\n".join(texts), "\n".join(thoughts), tuple(calls))


def _tool_call(block: dict[str, Any], where: str) -> ToolCall:
    arguments = as_object(block.get("input", {}), f"{where}.input")
    raw = arguments.get("malformed_arguments")
    text = raw if isinstance(raw, str) and len(arguments) == 1 else json_text(arguments)
    return ToolCall(as_text(block.get("id"), f"{where}.id"), as_text(block.get("name"), f"{where}.name"), text)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    blocks = as_list(content, where)
    return "\n".join(_block_text(as_object(b, f"{where}.{i}"), f"{where}.{i}") for i, b in enumerate(blocks))


def _block_text(block: dict[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise bad_request(f"{where} is of type {block.get('type')!r}: this model reads text only"[:300])
    return as_text(block.get("text"), f"{where}.text")


def _tools(body: dict[str, Any]) -> tuple[Tool, ...]:
    tools = []
    for i, value in enumerate(as_list(body.get("tools") or [], "tools")):
        value = as_object(value, f"tools.{i}")
        if value.get("type") not in (None, "custom"):
            raise bad_request(f"tools.{i}.type is {value.get('type')!r}: server-side tools are not served"[:300])
        tools.append(
            Tool(
                as_text(value.get("name"), f"tools.{i}.name"),
                as_text(value.get("description") or "", f"tools.{i}.description"),
                as_object(value.get("input_schema") or {}, f"tools.{i}.input_schema"),
            )
        )
    return tuple(tools)


def _tool_choice(value: Any) -> str:
    if value is None:
        return "auto"
    kind = as_object(value, "tool_choice").get("type")
    if kind == "tool":
        return as_text(value.get("name"), "tool_choice.name")
    if kind not in ("auto", "any", "none"):
        raise bad_request(f"tool_choice.type is {kind!r}: use auto, any, tool or none"[:300])
    return "required" if kind == "any" else str(kind)


# --------------------------------------------------------------------------------------------------------- replies


def reply(request: Request, reply: Reply) -> bytes:
    blocks: list[dict[str, Any]] = []
    if reply.message.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.message.reasoning, "signature": reply.call})
    if reply.message.text:
        blocks.append({"type": "text", "text": reply.message.text})
    blocks += [{"type": "tool_use", "id": c.id, "name": c.name, "input": _input(c)} for c in reply.message.tool_calls]
    head = _head(reply.call, reply.model)
    return orjson.dumps({**head, "content": blocks, **_stop_fields(reply), "usage": _usage(reply)})


def token_count(tokens: int) -> bytes:
    return orjson.dumps({"input_tokens": tokens})


def error(error: ApiError) -> bytes:
    return orjson.dumps(_error(error))


def stream(request: Request, call: str, created: int) -> _Stream:
    return _Stream(request, call)


class _Stream:
    """Events of one streamed message. The text block is opened at once, so that empty deltas can keep it alive."""

    def __init__(self, request: Request, call: str) -> None:
        self._head = _head(call, request.model)
        self._call = call
        self._open = False
        self._sent = 0  # characters of the text

    def start(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return event({"type": "message_start", "message": message}, "message_start")

    def text(self, delta: str) -> bytes:
        self._sent += len(delta)
        opening = b"" if self._open else self._block(0, {"type": "text", "text": ""})
        self._open = True
        return opening + self._delta(0, {"type": "text_delta", "text": delta})

    def keep_alive(self) -> bytes:
        return self.text("")

    def reply(self, reply: Reply) -> bytes:
        parts, index = [], 0
        message = reply.message
        if message.reasoning and not self._open:
            parts.append(self._block(0, {"type": "thinking", "thinking": "", "signature": ""}))
            parts.append(self._delta(0, {"type": "thinking_delta", "thinking": message.reasoning}))
            parts.append(self._delta(0, {"type": "signature_delta", "signature": self._call}))
            parts.append(self._end(0))
            index = 1
        if message.text or self._open:
            if not self._open:
                parts.append(self._block(index, {"type": "text", "text": ""}))
            if rest := message.text[self._sent :]:
                parts.append(self._delta(index, {"type": "text_delta", "text": rest}))
            parts.append(self._end(index))
            index += 1
        for i, call in enumerate(message.tool_calls, index):
            parts.append(self._block(i, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}))
            text = json_text(_input(call))
            parts.append(self._delta(i, {"type": "input_json_delta", "partial_json": text}))
            parts.append(self._end(i))
        delta = {"type": "message_delta", "delta": _stop_fields(reply), "usage": _usage(reply)}
        return b"".join(parts) + event(delta, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def error(self, error: ApiError) -> bytes:
        return event(_error(error), "error")

    def _block(self, index: int, block: dict[str, Any]) -> bytes:
        return event({"type": "content_block_start", "index": index, "content_block": block}, "content_block_start")

    def _delta(self, index: int, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")

    def _end(self, index: int) -> bytes:
        return event({"type": "content_block_stop", "index": index}, "content_block_stop")


def _head(call: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{call}", "type": "message", "role": "assistant", "model": model}


def _input(call: ToolCall) -> dict[str, Any]:
    try:
        value = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"malformed_arguments": call.arguments}


def _stop_fields(reply: Reply) -> dict[str, Any]:
    reason = "stop_sequence" if reply.stop_sequence is not None else _STOP_REASONS[reply.finish]
    return {"stop_reason": reason, "stop_sequence": reply.stop_sequence}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": reply.output_tokens,
    }


def _error(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.kind, "invalid_request_error")
    message = error.message
    if error.kind == "context_too_long":
        message = f"prompt is too long: {error.tokens} tokens > {error.maximum} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}
