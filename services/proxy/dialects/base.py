"""The neutral conversation: what every API dialect is translated to and from.

Invariant: a dialect reads a request without losing anything the model gets to see, and reports every fault as an
ApiError; it never raises anything else for a body that is JSON. Tool arguments stay the raw text that was received
(OpenAI) or the JSON text of the received object (Anthropic).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

import msgspec
import orjson

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "tool_calls"]


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str  # raw JSON text, possibly malformed


class Message(msgspec.Struct, frozen=True):
    role: Role
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # with role tool


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: dict[str, Any]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One model call as the harness asked for it."""

    dialect: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    stream: bool = False
    include_usage: bool = True
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    tool_choice: str = "auto"  # auto, none, required, or the name of a tool
    headers: Mapping[str, str] = {}
    custom_tools: Mapping[str, str] = {}
    """Responses dialect: names of tools that are not plain functions -> "custom" or "namespace:<name>"."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One model call's answer, complete and durably recorded."""

    call: str
    model: str
    created: int
    message: Message
    finish: Finish
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    stop_sequence: str | None = None


class ApiError(Exception):
    """A call that is refused or failed; each dialect has its own wire form for it.

    `kind`: bad_request, unauthorized, not_found, gone, too_large, context_too_long, unavailable, internal."""

    def __init__(
        self, status: int, kind: str, message: str, *, retry_after: float | None = None, limit: tuple[int, int] = (0, 0)
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message
        self.retry_after = retry_after
        self.tokens, self.maximum = limit  # with kind context_too_long

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": f"{max(1, round(self.retry_after))}"}


def bad_request(message: str) -> ApiError:
    return ApiError(400, "bad_request", message)


def context_too_long(tokens: int, maximum: int) -> ApiError:
    text = f"the prompt has {tokens} tokens, the context holds {maximum}: shorten the conversation"
    return ApiError(400, "context_too_long", text, limit=(tokens, maximum))


class StreamWriter(Protocol):
    """Writes one streamed reply as server-sent events."""

    def start(self) -> bytes:
        """What can be said before anything is generated."""
        ...

    def text(self, delta: str) -> bytes:
        """More of the reply's text, before the reply is whole. `reply` leaves out what was said."""
        ...

    def keep_alive(self) -> bytes:
        """An event without effect that harnesses count as activity."""
        ...

    def reply(self, reply: Reply) -> bytes:
        """Everything up to and including the end of the stream."""
        ...

    def error(self, error: ApiError) -> bytes:
        """A failure after the stream began."""
        ...


OPEN = -1
"""In Conversation.ends: the message of this entry may go on in the next entry."""


class Conversation:
    """The list of a request's body as messages, of which a beginning may have been read before (bodies.py).

    Invariant: however much was known, `messages`, `ends` and `ordered()` are what reading the whole list gives. ends[i]
    is how many messages the entries 0..i make, or OPEN. `messages` is in the order of the wire."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.ends: list[int] = []
        self._known = 0  # messages at the beginning that an earlier conversation had
        self._ordered: tuple[Message, ...] = ()

    def beginning(self, entries: int) -> Conversation:
        """A new conversation that begins with the first `entries` entries of this one; their end must not be OPEN."""
        new = Conversation()
        new._known = self.ends[entries - 1] if entries else 0
        new.messages, new.ends = self.messages[: new._known], self.ends[:entries]
        new._ordered = self._ordered
        return new

    def add(self, messages: Iterable[Message], *, open_end: bool = False) -> None:
        """What the next entry of the list adds."""
        self.messages.extend(messages)
        self.ends.append(OPEN if open_end else len(self.messages))

    def ordered(self) -> tuple[Message, ...]:
        """The messages with each run of tool results in the order of the calls that they answer."""
        settled = self._known  # an assistant turn settles the order of everything before it
        while settled and self.messages[settled - 1].role != "assistant":
            settled -= 1
        settled = max(0, settled - 1)
        self._ordered = self._ordered[:settled] + _ordered_results(self.messages[settled:])
        return self._ordered


class Dialect(Protocol):
    name: str
    list_key: str
    """The field of a body that holds the conversation."""

    def parse(self, body: Any, headers: Mapping[str, str], known: Conversation | None = None) -> Request:
        """A decoded JSON body to a Request; raises ApiError. With `known` the body's list holds only the entries that
        come after those of `known`, which is filled with what they add."""
        ...

    def reply(self, request: Request, reply: Reply) -> bytes:
        """The body of a reply that is not streamed."""
        ...

    def stream(self, request: Request, call: str, created: int) -> StreamWriter: ...

    def error(self, error: ApiError) -> bytes:
        """The body of an error response."""
        ...


def event(data: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


def json_text(value: Any) -> str:
    """Compact JSON; raises ApiError for values JSON cannot hold."""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise bad_request(f"not representable as JSON: {error}") from error


# ---------------------------------------------------------------------------- reading fields of an untrusted body


def as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be an object, not {_kind(value)}")
    return value


def as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise bad_request(f"{where} must be a list, not {_kind(value)}")
    return value


def as_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{where} must be a string, not {_kind(value)}")
    return value


def optional_number(body: dict[str, Any], key: str, low: float, high: float) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad_request(f"{key} must be a number from {low:g} to {high:g}, not {value!r}"[:300])
    return value


def optional_count(body: dict[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad_request(f"{key} must be a positive integer, not {value!r}"[:300])
    return value


def optional_flag(body: dict[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"{key} must be true or false, not {_kind(value)}")
    return bool(value)


def check_tool_choice(choice: str, tools: tuple[Tool, ...]) -> str:
    if choice not in ("auto", "none", "required") and choice not in {t.name for t in tools}:
        raise bad_request(f"tool_choice names the tool {choice!r}, which is not among the tools of the request")
    if choice == "required" and not tools:
        raise bad_request("tool_choice asks for a tool call, but the request has no tools")
    return choice


def with_instruction(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """The conversation with `text` at the end of its first system message, so that it stands at the same place in
    every call of one line of work."""
    if not text:
        return messages
    if messages and messages[0].role == "system":
        first = messages[0]
        return (msgspec.structs.replace(first, text=f"{first.text}\n\n{text}"), *messages[1:])
    return (Message("system", text), *messages)


def format_instruction(value: Any, where: str) -> str:
    """A request for structured output in the model's words; raises ApiError for forms that do not exist.

    Sampling is never constrained: a mask over the logits would be another distribution than the policy's, and its
    log-probabilities those of no policy. So the format is asked for, not enforced."""
    if value is None:
        return ""
    value = as_object(value, where)
    kind = value.get("type")
    if kind == "text":
        return ""
    if kind == "json_object":
        return "Answer with one JSON object and nothing else."
    if kind == "json_schema":
        nested = value.get("json_schema")
        schema = as_object(nested if nested is not None else value, f"{where}.json_schema").get("schema")
        text = json_text(as_object(schema if schema is not None else {}, f"{where}.schema"))
        return f"Answer with one JSON value and nothing else. It must fit this JSON schema: {text}"
    raise bad_request(f"{where}.type is {kind!r}: use text, json_object or json_schema"[:300])


def check_conversation(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if not messages:
        raise bad_request("messages must not be empty")
    if all(m.role == "system" for m in messages):
        raise bad_request("messages must hold more than system text")
    return messages


def _ordered_results(messages: list[Message]) -> tuple[Message, ...]:
    out: list[Message] = []
    order: dict[str, int] = {}
    run = 0  # length of the run of tool results at the end of `out`
    for message in messages:
        if message.role == "tool":
            run += 1
        else:
            run = 0
            if message.role == "assistant":
                order = {call.id: i for i, call in enumerate(message.tool_calls)}
        out.append(message)
        if run > 1:
            out[-run:] = sorted(out[-run:], key=lambda m: order.get(m.tool_call_id, len(order)))
    return tuple(out)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
