"""What the harness gets for what the policy generated.

Invariant: the reply is a function of the output ids, the request and the call id alone, so that a proxy that restarted
gives the same reply for the same record. Tool-call ids carry the call (canonical.tool_id).
"""

from __future__ import annotations

from services.proxy import canonical
from services.proxy.dialects.base import Finish, Message, Request, ToolCall
from services.proxy.rendering import Parsed

_PREFIX = {"anthropic": "toolu"}


def assistant(parsed: Parsed, call: str, dialect: str) -> Message:
    """The whole of what was generated, as one assistant message."""
    tag, prefix = canonical.call_tag(call), _PREFIX.get(dialect, "call")
    calls = tuple(
        ToolCall(canonical.tool_id(tag, i, prefix), name, arguments) for i, (name, arguments) in enumerate(parsed.calls)
    )
    return Message("assistant", parsed.text, parsed.reasoning, calls)


def payloads(parsed: Parsed) -> tuple[str, ...]:
    """Canonical forms of the tool calls, by position."""
    return tuple(canonical.tool_call(ToolCall("", name, arguments)) for name, arguments in parsed.calls)


def delivered(message: Message, raw: str, request: Request) -> tuple[Message, str | None]:
    """(the message that the harness gets, the stop sequence that ended it). Tool calls that the request did not allow
    stay text (`raw`); text ends before the first stop sequence."""
    if message.tool_calls and (not request.tools or request.tool_choice == "none"):
        message = Message("assistant", raw, message.reasoning)
    found = [(at, stop) for stop in request.stop if (at := message.text.find(stop)) >= 0]
    if not found:
        return message, None
    at, stop = min(found)
    return Message("assistant", message.text[:at], message.reasoning), stop


def finish_of(message: Message, finish: str, stop: str | None) -> Finish:
    if stop is not None:
        return "stop"
    if finish == "length":
        return "length"
    return "tool_calls" if message.tool_calls else "stop"
