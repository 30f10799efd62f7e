"""Getting one reply to the harness: waiting, keeping the connection alive, noticing that it is gone.

Invariant: a call counts as delivered only if its last byte was handed to a connection that was still open; everything
else leaves it to be picked up by a retry. Before the reply is recorded nothing of it is sent but text of a stream whose
harness is known to drop a turn that was cut inside its text (profile: early_text); tool calls are never begun before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Send

from services.proxy.calls import Call, Calls
from services.proxy.dialects.base import ApiError, Dialect, Request, StreamWriter

KEEP_ALIVE_S = 15.0
"""Longest silence on a connection; harnesses give up after 120 s and more."""

EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
JSON = {"content-type": "application/json"}


async def deliver(calls: Calls, dialect: Dialect, request: Request, call: Call, receive: Receive, send: Send) -> None:
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        with call.joined():
            whole = await (_stream if request.stream else _plain)(calls, dialect, request, call, gone, send)
        if whole and not gone.done():
            calls.delivered(call)
    finally:
        gone.cancel()
        calls.lost(call)


async def _stream(
    calls: Calls, dialect: Dialect, request: Request, call: Call, gone: asyncio.Future[None], send: Send
) -> bool:
    """Server-sent events. True if the whole reply was sent."""
    writer = dialect.stream(request, call.call, call.created)
    await send(_start(200, EVENT_STREAM))
    await send(_part(writer.start()))
    sent = 0
    while not call.reply.done():
        grown = await _wait(call, gone)
        if call.reply.done():
            break
        if gone.done():
            return False
        text = call.reading.text if call.early and call.reading is not None else ""
        if len(text) > sent:
            await send(_part(writer.text(text[sent:])))
            sent = len(text)
        elif not grown:
            await send(_part(writer.keep_alive()))
    if call.reply.cancelled():  # the proxy stops: a broken connection is what every harness tries again after
        return False
    error = _error(call) or _contradiction(call, sent)
    if error is not None and error.retry_after is not None:
        return False  # as above: some harnesses take an error inside a stream for the end of their work
    if error is not None:
        await send(_part(writer.error(error), last=True))
        return False
    await calls.before_delivery(call)
    return await _last_part(writer, call, gone, send)


async def _last_part(writer: StreamWriter, call: Call, gone: asyncio.Future[None], send: Send) -> bool:
    if gone.done():
        return False
    await send(_part(writer.reply(call.reply.result()), last=True))
    return True


def _contradiction(call: Call, sent: int) -> ApiError | None:
    """What was shown early must be the beginning of the reply; if not, a retry gets the whole of it."""
    shown = call.reading.text[:sent] if sent and call.reading is not None else ""
    if call.reply.result().message.text.startswith(shown):
        return None
    return ApiError(503, "unavailable", f"call {call.call} has to be sent again", retry_after=1)


async def _plain(
    calls: Calls, dialect: Dialect, request: Request, call: Call, gone: asyncio.Future[None], send: Send
) -> bool:
    """One JSON body, with blanks before it while there is nothing to say. True if the whole reply was sent."""
    begun = False
    while not call.reply.done():
        grown = await _wait(call, gone)
        if gone.done() and not call.reply.done():
            return False
        if call.reply.done() or grown:
            continue
        if not begun:
            await send(_start(200, JSON))
            begun = True
        await send(_part(b" "))
    error = _error(call)
    if error is not None:
        if not begun:
            await send_body(send, error.status, dialect.error(error), error.headers())
        return False  # with the headers out, a body that ends too early is the only way to say it
    await calls.before_delivery(call)
    if gone.done():
        return False
    body = dialect.reply(request, call.reply.result())
    if begun:
        await send(_part(body, last=True))
    else:
        await send_body(send, 200, body)
    return True


async def _wait(call: Call, gone: asyncio.Future[None]) -> bool:
    """Until there is the reply, the end of the connection, new text (true), or it is time for a sign of life."""
    grown = asyncio.ensure_future(call.grown.wait())
    try:
        ends: set[asyncio.Future[Any]] = {call.reply, gone, grown}
        await asyncio.wait(ends, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
        return call.grown.is_set()
    finally:
        grown.cancel()
        call.grown.clear()


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


async def send_error_stream(send: Any, writer: StreamWriter, error: ApiError) -> None:
    """An error that harnesses of the dialect look for inside a stream."""
    await send(_start(200, EVENT_STREAM))
    await send(_part(writer.start() + writer.error(error), last=True))


def _start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    pairs = [(k.encode(), v.encode()) for k, v in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _part(body: bytes, *, last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": not last}
