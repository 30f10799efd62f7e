"""Reading request bodies at the cost of what is new in them.

A harness sends the whole conversation with each call. Of each execution's latest bodies the bytes of the conversation's
list are kept, with the places where its entries end and the messages that they were read as. A body whose list begins
with the same bytes is read from the last such place on: the entries before it are replaced by one mark, the rest is
parsed as any body, and the mark must come out as the first entry of the list.

Invariant: `read` gives what `dialect.parse(decode_json(data))` gives, or raises the same; what differs is only the time
it takes. Why this holds: entries are JSON objects, so equal bytes up to the end of one are equal entries; the mark
cannot be known to a client, so where it comes out first, the list that was cut is the one that counts, whatever other
fields the body has, twice or nested or after the list.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from services.proxy.dialects.base import OPEN, Conversation, Dialect, Request, bad_request

BYTES_KEPT = 512 * 2**20
"""Bytes of lists that are kept in all; the strings of their messages take about as much again."""
BYTES_PER_EXECUTION = 6 * 2**20
"""Beyond them only the latest body of an execution is kept."""
LINES_PER_EXECUTION = 4
"""Lines of work (main task, sub-agents) whose latest body is kept."""
CHANGED_AT_END = 3
"""Entries at the end of a body that the next one of its line may have in another form (moved cache marks)."""
FIRST_STEP = 4096

_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.S)
_LIST = {key: re.compile(rb'"' + key.encode() + rb'"\s*:\s*\[\s*') for key in ("messages", "input")}

Parse = Callable[[Any, Mapping[str, str], Conversation], Request]


@dataclass(frozen=True, eq=False, slots=True)
class _Line:
    """The latest body of one line of work. `data`: the part of it from the list's first entry to the end of the last
    one, which keeps the body alive without copying it; `ends`: offsets in `data` at which entries end."""

    dialect: str
    data: memoryview
    ends: list[int]
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class _Cut:
    """A beginning of the body's list that `line` has as well: `entries` entries, `length` bytes."""

    line: _Line | None
    entries: int = 0
    length: int = 0


class Bodies:
    def __init__(self, room: int = BYTES_KEPT) -> None:
        self._mark = f"{secrets.token_hex(16)}"
        self._lines: OrderedDict[str, list[_Line]] = OrderedDict()  # executions, the latest last; lines, latest first
        self.kept, self._room = 0, room

    def read(
        self, execution: str, dialect: Dialect, data: bytes, headers: Mapping[str, str], parse: Parse | None = None
    ) -> Request:
        """The request that `data` is, by `parse` (dialect.parse); raises ApiError."""
        found = _LIST[dialect.list_key].search(data)
        if found is not None:
            cut = self._longest(execution, dialect, data, found.end())
            fields = self._rest(data, found.end(), dialect.list_key, cut)
            if fields is not None:
                conversation = cut.line.conversation.beginning(cut.entries) if cut.line else Conversation()
                request = (parse or dialect.parse)(fields, headers, conversation)
                self._keep(execution, dialect, data, found.end(), cut, conversation)
                return request
        return (parse or dialect.parse)(decode_json(data), headers, Conversation())

    def forget(self, execution: str) -> None:
        for line in self._lines.pop(execution, ()):
            self.kept -= len(line.data)

    # -------------------------------------------------------------------------------------------------- the known

    def _longest(self, execution: str, dialect: Dialect, data: bytes, start: int) -> _Cut:
        best = _Cut(None)
        for line in self._lines.get(execution, ()):
            if line.dialect != dialect.name:
                continue
            entries = bisect_right(line.ends, _shared(line.data, data, start))
            while entries and line.conversation.ends[entries - 1] == OPEN:
                entries -= 1
            if entries > best.entries:
                best = _Cut(line, entries, line.ends[entries - 1])
        return best

    def _rest(self, data: bytes, start: int, key: str, cut: _Cut) -> dict[str, Any] | None:
        """The body with only the entries after `cut`; None if it has to be read whole."""
        comma = b"" if cut.entries else b","
        marked = b'%b"%b"%b%b' % (data[:start], self._mark.encode(), comma, data[start + cut.length :])
        try:
            fields: dict[str, Any] = orjson.loads(marked)
        except orjson.JSONDecodeError:
            return None
        entries = fields.get(key) if isinstance(fields, dict) else None
        if not isinstance(entries, list) or not entries or entries[0] != self._mark:
            return None
        del entries[0]
        return fields

    # ------------------------------------------------------------------------------------------------------ keeping

    def _keep(
        self, execution: str, dialect: Dialect, data: bytes, start: int, cut: _Cut, conversation: Conversation
    ) -> None:
        new = [end - start for end in _ends(data, start + cut.length)]
        ends = [*cut.line.ends[: cut.entries], *new] if cut.line else new
        if len(ends) != len(conversation.ends) or not ends:
            return
        lines = self._lines.pop(execution, [])
        if cut.line is not None and cut.entries >= len(cut.line.ends) - CHANGED_AT_END:
            lines.remove(cut.line)
            self.kept -= len(cut.line.data)
        lines.insert(0, _Line(dialect.name, memoryview(data)[start : start + ends[-1]], ends, conversation))
        self.kept += len(lines[0].data)
        while len(lines) > LINES_PER_EXECUTION or (
            len(lines) > 1 and sum(len(line.data) for line in lines) > BYTES_PER_EXECUTION
        ):
            self.kept -= len(lines.pop().data)
        self._lines[execution] = lines
        while self.kept > self._room and len(self._lines) > 1:
            self.forget(next(iter(self._lines)))


def _shared(known: memoryview, data: bytes, start: int) -> int:
    """How many bytes `known` and data[start:] have in common at their beginning."""
    if data.startswith(known, start):
        return len(known)
    end = min(len(known), len(data) - start)
    low, step = 0, FIRST_STEP
    while low + step <= end and data.startswith(known[low : low + step], start + low):
        low, step = low + step, 2 * step
    high = min(end, low + step)
    while low < high:
        middle = (low + high + 1) // 2
        if data.startswith(known[low:middle], start + low):
            low = middle
        else:
            high = middle - 1
    return low


def _ends(data: bytes, at: int) -> list[int]:
    """Offsets at which the entries of a list end, from offset `at` (inside the list) to the list's end. The list must
    be known to be valid JSON."""
    ends, depth = [], 0
    for token in _TOKENS.finditer(data, at):
        first = data[token.start()]
        if first in b"[{":
            depth += 1
        elif first in b"]}":
            depth -= 1
            if depth < 0:
                break
            if depth == 0:
                ends.append(token.end())
    return ends


# ------------------------------------------------------------------------------------------------------- whole bodies


def decode_json(data: bytes) -> Any:
    """The body's JSON. Lone surrogates, which some harnesses send for undecodable file content, become U+FFFD."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        reason = str(error)
    try:
        return _without_surrogates(json.loads(data))
    except (ValueError, RecursionError):
        raise bad_request(f"the request body is no valid JSON: {reason}") from None


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(v) for v in value]
    return value
