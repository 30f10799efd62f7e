"""Token ids as the JSON text that an engine gets, in pieces that calls share and that are sent without being joined.

Invariant: `extended` keeps every piece at least twice as long as the one behind it. So a conversation of any length is
in few pieces, and a byte is copied as often as its piece doubles, not once per call.
"""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
import numpy as np
import orjson
from aiohttp.abc import AbstractStreamWriter

from shared.tree import Ids

Pieces = tuple[bytes, ...]
"""Consecutive ids as JSON, each number behind a comma."""


def written(ids: Ids) -> bytes:
    """Ids as JSON numbers, each behind a comma."""
    if not len(ids):
        return b""
    return b"," + orjson.dumps(np.ascontiguousarray(ids, dtype=np.int32), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def extended(pieces: Pieces, ids: Ids) -> Pieces:
    """`pieces` with `ids` behind them."""
    last = [written(ids)]
    length, count = len(last[0]), len(pieces)
    if not length:
        return pieces
    while count and len(pieces[count - 1]) < 2 * length:
        count -= 1
        length += len(pieces[count])
        last.append(pieces[count])
    return (*pieces[:count], b"".join(reversed(last)))


class InPieces(aiohttp.Payload):
    """A request's JSON body that is sent piece by piece."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        super().__init__(pieces, content_type="application/json")
        self._size = sum(map(len, pieces))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in self._value:
            await writer.write(piece)
