"""The answers of the Responses dialect: output items, and the events of a stream that builds them up.

Invariant: the items of a streamed answer, put together from its events, are those of the same answer unstreamed.
"""

from __future__ import annotations

from typing import Any

import orjson

from services.proxy.dialects import openai_chat
from services.proxy.dialects.base import ApiError, Message, Reply, Request, ToolCall, event


def answer(request: Request, reply: Reply) -> dict[str, Any]:
    """The whole response object."""
    incomplete = reply.finish == "length"
    head = _head(request, reply.call, reply.created, "incomplete" if incomplete else "completed")
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens},
        "output_tokens": reply.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
    }
    details = {"reason": "max_output_tokens"} if incomplete else None
    output = items(request, reply.call, reply.message)
    return {**head, "incomplete_details": details, "output": output, "usage": usage}


def items(request: Request, call: str, message: Message) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if message.reasoning:
        found.append(_reasoning_item(call, message.reasoning))
    if message.text or not message.tool_calls:
        found.append(_message_item(call, message.text))
    return found + [_call_item(request, c) for c in message.tool_calls]


def _head(request: Request, call: str, created: int, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{call}",
        "object": "response",
        "created_at": created,
        "status": status,
        "model": request.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _reasoning_item(call: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{call}", "summary": [], "content": content, "encrypted_content": None}


def _message_item(call: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [_text_part(text)] if status == "completed" else []
    return {"type": "message", "id": f"msg_{call}", "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(request: Request, call: ToolCall) -> dict[str, Any]:
    kind = request.custom_tools.get(call.name, "")
    item = {"id": f"fc_{call.id.partition('_')[2]}", "call_id": call.id, "name": call.name, "status": "completed"}
    if kind == "custom":
        return {"type": "custom_tool_call", **item, "input": _input_text(call.arguments)}
    if kind:
        item["namespace"] = kind.partition(":")[2]
    return {"type": "function_call", **item, "arguments": call.arguments}


def _input_text(arguments: str) -> str:
    """The text argument of a custom tool; what the policy wrote instead, if it is none."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


class Stream:
    """Events of one streamed response. Early text opens the message item as the first one."""

    def __init__(self, request: Request, call: str, created: int) -> None:
        self._request, self._call, self._created = request, call, created
        self._number = 0
        self._open = False
        self._sent = 0  # characters of the text

    def start(self) -> bytes:
        return self._response("created", "in_progress") + self._response("in_progress", "in_progress")

    def keep_alive(self) -> bytes:
        return self._response("in_progress", "in_progress")

    def text(self, delta: str) -> bytes:
        opening = b"" if self._open else self._open_message(0)
        self._open, self._sent = True, self._sent + len(delta)
        return opening + self._delta(0, delta)

    def reply(self, reply: Reply) -> bytes:
        whole = answer(self._request, reply)
        parts = []
        output = whole["output"]
        if self._open:  # its place is given away: reasoning, which plain text never follows here, would come late
            output = [i for i in output if i["type"] == "message"] + [i for i in output if i["type"] != "message"]
            whole["output"] = output
        for index, item in enumerate(output):
            parts.append(self._item(index, item))
        kind = "incomplete" if whole["status"] == "incomplete" else "completed"
        return b"".join(parts) + self._event(f"response.{kind}", {"response": whole})

    def error(self, error: ApiError) -> bytes:
        failed = _head(self._request, self._call, self._created, "failed")
        wire = orjson.loads(openai_chat.error(error))["error"]
        failed["error"] = {"code": wire["code"] if error.kind == "context_too_long" else "server_error"}
        failed["error"]["message"] = wire["message"]
        return self._event("response.failed", {"response": failed})

    # ------------------------------------------------------------------------------------------------------- items

    def _item(self, index: int, item: dict[str, Any]) -> bytes:
        if item["type"] == "message":
            return self._message(index, item)
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            parts = [self._added(index, {**item, "arguments": "", "status": "in_progress"})]
            parts.append(self._event("response.function_call_arguments.delta", {**place, "delta": item["arguments"]}))
            done = {**place, "name": item["name"], "arguments": item["arguments"]}
            parts.append(self._event("response.function_call_arguments.done", done))
        elif item["type"] == "custom_tool_call":
            parts = [self._added(index, {**item, "input": "", "status": "in_progress"})]
            parts.append(self._event("response.custom_tool_call_input.delta", {**place, "delta": item["input"]}))
            parts.append(self._event("response.custom_tool_call_input.done", {**place, "input": item["input"]}))
        else:
            parts = [self._added(index, {**item, "content": []}), self._reasoning(place, item)]
        return b"".join([*parts, self._done(index, item)])

    def _reasoning(self, place: dict[str, Any], item: dict[str, Any]) -> bytes:
        text = item["content"][0]["text"]
        delta = self._event("response.reasoning_text.delta", {**place, "content_index": 0, "delta": text})
        return delta + self._event("response.reasoning_text.done", {**place, "content_index": 0, "text": text})

    def _message(self, index: int, item: dict[str, Any]) -> bytes:
        text = item["content"][0]["text"]
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        opening = b"" if self._open else self._open_message(index)
        rest = text[self._sent :]
        delta = self._delta(index, rest) if rest else b""
        done = self._event("response.output_text.done", {**place, "text": text, "logprobs": []})
        part = self._event("response.content_part.done", {**place, "part": _text_part(text)})
        return opening + delta + done + part + self._done(index, item)

    def _open_message(self, index: int) -> bytes:
        item = _message_item(self._call, "", "in_progress")
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        added = self._added(index, item)
        return added + self._event("response.content_part.added", {**place, "part": _text_part("")})

    def _delta(self, index: int, delta: str) -> bytes:
        place = {"item_id": f"msg_{self._call}", "output_index": index, "content_index": 0}
        return self._event("response.output_text.delta", {**place, "delta": delta, "logprobs": []})

    def _added(self, index: int, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", {"output_index": index, "item": item})

    def _done(self, index: int, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.done", {"output_index": index, "item": item})

    def _response(self, kind: str, status: str) -> bytes:
        response = _head(self._request, self._call, self._created, status)
        return self._event(f"response.{kind}", {"response": response})

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **data}, kind)
