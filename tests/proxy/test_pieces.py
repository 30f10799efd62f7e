"""Ids in pieces: the same text however they came, few pieces, few copies, and sent whole."""

import itertools

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from services.proxy.pieces import InPieces, extended, written

PARTS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=30), max_size=40)


@given(parts=PARTS)
def test_pieces_together_are_the_ids_and_each_is_twice_as_long_as_the_next(parts):
    pieces = ()
    for part in parts:
        pieces = extended(pieces, np.asarray(part, dtype=np.int32))
        sizes = [len(piece) for piece in pieces]
        assert all(a >= 2 * b for a, b in itertools.pairwise(sizes))
    assert b"".join(pieces) == written(np.asarray([i for part in parts for i in part], dtype=np.int32))


def test_a_call_costs_what_is_new_in_it():
    copied, pieces, new = 0, (), np.arange(1000, 1500, dtype=np.int32)
    for _ in range(1000):
        before, pieces = pieces, extended(pieces, new)
        copied += len(pieces[-1])
        assert pieces[:-1] == before[: len(pieces) - 1]
        assert all(a is b for a, b in zip(pieces[:-1], before, strict=False))
    assert copied < 12 * 1000 * len(written(new))  # log2(1000) copies of each
    assert len(pieces) < 12


@pytest.mark.parametrize("count", [0, 3, 300_000])
async def test_a_body_in_pieces_arrives_as_one(count):
    got = []

    async def answer(request):
        got.append((await request.read(), request.headers["content-length"], request.content_type))
        return web.Response()

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    text = written(np.arange(count, dtype=np.int32))
    parts = [b"[", memoryview(text)[1:], b"]"]
    async with aiohttp.ClientSession() as http:
        for _ in range(2):  # on one connection
            await http.post(f"http://127.0.0.1:{runner.addresses[0][1]}/", data=InPieces(parts))
    await runner.cleanup()
    assert got == [(b"".join(parts), str(sum(map(len, parts))), "application/json")] * 2
