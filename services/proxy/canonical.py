"""The canonical form of a conversation, and the hash chain over it by which contexts are compared.

Invariant: two conversations have the same key exactly when they mean the same to the model, however they are written:
key order, number and unicode forms, blanks around texts, a string or a list of text blocks, cache marks, and the
dialect's prefix of our tool-call ids make no difference. The key after message i depends on tools and messages 0..i
only, so that a longer conversation has the keys of its beginnings. Reasoning is left out: harnesses trim or drop it.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

from services.proxy.dialects.base import Message, Tool, ToolCall

OUR_TOOL_ID = re.compile(r"(?:call|toolu|fc)_(a\d+c\d{4,}(?:p[0-9A-Za-z]+?)?)t(\d+)\Z")
"""Our tool-call ids carry attempt, call number, proxy (if there are several) and position: call_a1c0007t0."""

_CALL = re.compile(r"a(\d+)c(\d+)(p[0-9A-Za-z]+)?(-part\d+)?\Z")

Restore = Callable[[str, int], str | None]
"""(call tag, position) -> canonical form of the tool call that the policy made there, None if unknown."""


def tool_id(tag: str, position: int, prefix: str = "call") -> str:
    """`tag` is the call's tag: a<attempt>c<number>."""
    return f"{prefix}_{tag}t{position}"


def call_tag(call: str) -> str:
    """``g000012x03a1c0007`` -> ``a1c0007``."""
    return "a" + call.rpartition("a")[2]


def call_number(call: str) -> int:
    """``g000012x03a1c0007p2`` -> 7; 0 if it is no call id."""
    found = _CALL.search(call)
    return int(found[2]) if found else 0


def call_of(execution: str, tag: str) -> str:
    """The inverse of call_tag."""
    return execution + tag


def text(value: str) -> str:
    """Composed unicode, \\n line ends, no blanks at the ends."""
    value = value.strip()
    if value.isascii():
        return value.replace("\r\n", "\n") if "\r" in value else value
    return unicodedata.normalize("NFC", value).replace("\r\n", "\n")


def arguments(raw: str) -> str:
    """Canonical form of a tool call's arguments; text that is no JSON stands for itself."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = _lenient(raw)
        if value is None:
            return "!" + text(raw)
    try:
        return _json(value)
    except RecursionError:
        return "!" + text(raw)


def _lenient(raw: str) -> Any:
    """What the standard library reads beyond the JSON standard: lone surrogates, NaN, very large integers."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def value(data: Any) -> str:
    """Canonical JSON of plain data: sorted keys, 1.0 == 1, composed unicode."""
    return _json(data)


def _json(data: Any) -> str:
    return json.dumps(_plain(data), sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def _plain(data: Any) -> Any:
    if isinstance(data, str):
        return data if data.isascii() else unicodedata.normalize("NFC", data)
    if isinstance(data, bool) or data is None or isinstance(data, int):
        return data
    if isinstance(data, float):
        return _number(data)
    if isinstance(data, dict):
        return {_plain(k): _plain(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(v) for v in data]
    return str(data)


def _number(number: float) -> Any:
    if number.is_integer():
        try:
            return int(Decimal(repr(number)))
        except (InvalidOperation, ValueError):
            return number
    return number


def tool_call(call: ToolCall) -> str:
    return _json([call.name.strip(), arguments(call.arguments)])


def message(message: Message, restore: Restore | None = None, *, fold: Iterable[re.Pattern[str]] = ()) -> bytes:
    """Canonical bytes of one message. `restore` puts the payload of our own tool calls back; `fold` deletes what a
    harness changes from call to call in system text."""
    body = text(message.text)
    if message.role == "system":
        for pattern in fold:
            body = pattern.sub("", body)
    parts: list[Any] = [message.role, body]
    if message.role == "tool":
        parts.append(_known_id(message.tool_call_id))
    elif message.tool_calls:
        parts.append([_restored(call, restore) for call in message.tool_calls])
    return orjson.dumps(parts)


def _known_id(identifier: str) -> str:
    match = OUR_TOOL_ID.match(identifier)
    return f"{match[1]}t{match[2]}" if match else identifier


def _restored(call: ToolCall, restore: Restore | None) -> list[str]:
    match = OUR_TOOL_ID.match(call.id)
    original = restore(match[1], int(match[2])) if match and restore else None
    return [_known_id(call.id), original if original is not None else tool_call(call)]


def root(tools: Iterable[Tool]) -> bytes:
    """Key of the empty conversation under these tools."""
    rows = [[t.name, text(t.description), t.parameters] for t in tools]
    return hashlib.blake2b(_json(rows).encode(), digest_size=16).digest()


_roots: list[tuple[tuple[Tool, ...], bytes]] = []
ROOTS_KEPT = 16


def root_of(tools: tuple[Tool, ...]) -> bytes:
    """`root`, remembered for the last few tool lists: comparing them is far cheaper than writing them anew."""
    for known, key in _roots:
        if known == tools:
            return key
    key = root(tools)
    _roots.insert(0, (tools, key))
    del _roots[ROOTS_KEPT:]
    return key


def step(key: bytes, canonical: bytes) -> bytes:
    """Key of a conversation with one more message."""
    return hashlib.blake2b(canonical, digest_size=16, key=key).digest()


def digest(value: str) -> str:
    return hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
