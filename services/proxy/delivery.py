"""Getting one reply to the harness: waiting, keeping the connection alive, noticing that it is gone.

Invariant: a call counts as delivered only if its last byte was handed to a connection that was still open; everything
else leaves it to be picked up by a retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Send

from services.proxy.calls import Call, Calls
from services.proxy.dialects.base import ApiError, Dialect, Request

KEEP_ALIVE_S = 15.0
"""Longest silence on a connection; harnesses give up after 120 s and more."""

EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
JSON = {"content-type": "application/json"}


async def deliver(calls: Calls, dialect: Dialect, request: Request, call: Call, receive: Receive, send: Send) -> None:
    with call.joined():
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            whole = await (_stream if request.stream else _plain)(dialect, request, call, gone, send)
            if whole and not gone.done():
                calls.delivered(call)
        finally:
            gone.cancel()


async def _stream(dialect: Dialect, request: Request, call: Call, gone: asyncio.Future[None], send: Send) -> bool:
    """Server-sent events. True if the whole reply was sent."""
    writer = dialect.stream(request, call.call, call.created)
    await send(_start(200, EVENT_STREAM))
    await send(_part(writer.start()))
    while not await _done(call, gone):
        if gone.done():
            return False
        await send(_part(writer.keep_alive()))
    error = _error(call)
    if error is not None:
        await send(_part(writer.error(error), last=True))
        return False
    await send(_part(writer.reply(call.reply.result()), last=True))
    return True


async def _plain(dialect: Dialect, request: Request, call: Call, gone: asyncio.Future[None], send: Send) -> bool:
    """One JSON body, with blanks before it while there is nothing to say. True if the whole reply was sent."""
    begun = False
    while not await _done(call, gone):
        if gone.done():
            return False
        if not begun:
            await send(_start(200, JSON))
            begun = True
        await send(_part(b" "))
    error = _error(call)
    if error is not None:
        if not begun:
            await send_body(send, error.status, dialect.error(error), error.headers())
        return False  # with the headers out, a body that ends too early is the only way to say it
    body = dialect.reply(request, call.reply.result())
    if begun:
        await send(_part(body, last=True))
    else:
        await send_body(send, 200, body)
    return True


async def _done(call: Call, gone: asyncio.Future[None]) -> bool:
    """Wait for the reply, the end of the connection, or the time for a sign of life; True if the reply is there."""
    if not call.reply.done():
        ends: set[asyncio.Future[Any]] = {call.reply, gone}
        await asyncio.wait(ends, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
    return call.reply.done()


def _error(call: Call) -> ApiError | None:
    if call.reply.cancelled():
        return ApiError(503, "unavailable", "the proxy is stopping", retry_after=1)
    error = call.reply.exception()
    assert error is None or isinstance(error, ApiError)
    return error


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_body(send: Any, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    await send(_start(status, {**JSON, "content-length": str(len(body)), **(headers or {})}))
    await send(_part(body, last=True))


def _start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    pairs = [(k.encode(), v.encode()) for k, v in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _part(body: bytes, *, last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": not last}
