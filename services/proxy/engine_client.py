"""Token ids to an engine and back (SGLang's /generate), across moves, aborts, hangs and deaths of engines.

Invariant: every token of a Generation was reported by an engine together with its log-probability, once, in order; what
an engine gave before it was cut is kept, and the next engine continues from prompt + partial. An engine that is silent
is asked whether it lives; one that does not answer is left. A call that is cancelled is ended at its engine first, and
what the engine has is taken, so that records hold every token that engines count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import orjson

from services.proxy.generation import BadReport, Generation
from services.proxy.handover import Handover
from services.proxy.pieces import InPieces, extended
from shared.events import Sampling
from shared.ids import request_id

log = logging.getLogger("gyre.proxy.engine")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
CONNECT_S = 5.0
SILENCE_S = 60.0
"""So long an engine may say nothing (queue, prefill) before it is asked for its health, again and again."""
HEALTH_S = 30.0
"""So long the answer may take: SGLang gives its own scheduler 20 s."""
LAST_WORD_S = 30.0
"""So long a cancelled call waits for what its engine has generated. A busy engine needs time, and nobody else waits."""
ABORT_AGAIN_S = 0.5
"""An abort that came before the engine knew the call is lost."""
ANSWER_S, ANSWER_TRIES = 2.0, 3
"""Another proxy that does not answer so often, for so long, is gone."""
TAKE_S = 45.0
"""So long an engine may take to end a call and hand out what it generated: more than its own limit for that."""
REST_S = 2.0
"""So long the end of an answer may take after its last report."""
BAD_REPORTS = 3
"""After so many reports that cannot be true, in one call, the call fails."""
_TOO_LONG = re.compile(r"context length|too long|exceeds?\b.*(?:max|limit|length)|longer than", re.I)


class Route(NamedTuple):
    cell: int
    url: str
    version: int


class EngineUnavailable(Exception):
    """Nobody answers there, or the engine cannot take the call now: another try may work."""


class Cut(EngineUnavailable):
    """The engine ended the call because it was asked to: the call goes on elsewhere."""


class EngineRefused(Exception):
    """The engine says that this call can never work, or what it reports is broken."""


class NoRoute(Exception):
    """No engine served the call until its deadline."""


FindRoute = Callable[[float], Awaitable[Route | None]]
"""(timeout in seconds) -> where the call goes now, None if there was no engine in that time."""


Moved = Callable[[str], Awaitable[Handover | None]]
"""(request id) -> waits until the request, which was cut, may go on; None if nobody told why."""


Ready = Callable[[], Awaitable[None]]
"""Returns when everything is durable that must be before an engine gets the call."""


async def nobody_tells(_rid: str) -> Handover | None:
    return None


async def at_once() -> None:
    return None


class EngineClient:
    """Pooled connections to all engines."""

    def __init__(self, stop_ids: tuple[int, ...]) -> None:
        self._stop_ids = list(stop_ids)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._rests: set[asyncio.Task[None]] = set()
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20)

    async def close(self) -> None:
        for task in self._rests:
            task.cancel()
        await asyncio.gather(*self._rests, return_exceptions=True)
        await self._session.close()

    def is_end(self, token: int) -> bool:
        """Whether an output ends with this token."""
        return token in self._stop_ids

    async def generate(
        self,
        generation: Generation,
        sampling: Sampling,
        find_route: FindRoute,
        deadline: float,
        call: str,
        moved: Moved = nobody_tells,
        ready: Ready = at_once,
        first_try: int = 0,
    ) -> None:
        """Fill `generation` to its end. `deadline` in time.monotonic(). Raises NoRoute or EngineRefused.
        `first_try`: number of the requests that were made for this call before.

        Cancelled, it takes what the engine has, within LAST_WORD_S."""
        pause, tries, bad = FIRST_PAUSE_S, first_try, 0
        handover: Handover | None = None
        while not generation.finish:
            waited = time.monotonic()
            route = await find_route(deadline - waited)
            generation.queued_s += time.monotonic() - waited
            if route is None:
                raise NoRoute
            before = len(generation.ids)
            tries += 1
            rid = request_id(call, tries)
            key = handover.extra_key if handover is not None and handover.cell == route.cell else ""
            handover = None
            try:
                await self._watched(generation, sampling, route, rid, key, ready)
            except Cut:
                stopped = time.monotonic()
                handover = await moved(rid)
                generation.queued_s += time.monotonic() - stopped
            except EngineUnavailable as error:
                log.info("call %s at cell %d (%s): %s", rid, route.cell, route.url, error)
            except BadReport as error:
                bad += 1
                log.error("call %s at cell %d (%s): %s", rid, route.cell, route.url, error)
                if bad >= BAD_REPORTS:
                    raise EngineRefused(f"the engine's reports are broken: {error}") from error
            if generation.finish:
                return
            if handover is not None:
                continue
            if time.monotonic() + pause > deadline:
                raise NoRoute
            pause = FIRST_PAUSE_S if len(generation.ids) > before else min(2 * pause, LONGEST_PAUSE_S)
            await asyncio.sleep(pause)
            generation.queued_s += pause

    async def _watched(
        self, generation: Generation, sampling: Sampling, route: Route, rid: str, key: str, ready: Ready
    ) -> None:
        """One request, left if the engine falls silent and does not answer for its health either."""
        attempt = asyncio.create_task(self._attempt(generation, sampling, route, rid, key, ready), name=rid)
        try:
            while True:
                before = len(generation.ids)
                done, _ = await asyncio.wait({attempt}, timeout=SILENCE_S)
                if done:
                    return attempt.result()
                if len(generation.ids) == before and not await self._healthy(route.url):
                    raise EngineUnavailable(f"silent for {SILENCE_S:g} s, and no answer about its health")
        except asyncio.CancelledError:
            await self._last_word(attempt, route, rid)
            raise
        finally:
            if not attempt.done():
                attempt.cancel()
                with contextlib.suppress(asyncio.CancelledError, EngineUnavailable, EngineRefused, BadReport):
                    await attempt

    async def _last_word(self, attempt: asyncio.Task[None], route: Route, rid: str) -> None:
        """End the request at its engine and let its answer be read to the end, if that comes in time."""
        try:
            async with asyncio.timeout(LAST_WORD_S):
                while not attempt.done():
                    await self._abort(route.url, rid)
                    await asyncio.wait({attempt}, timeout=ABORT_AGAIN_S)
        except TimeoutError:
            log.warning("call %s: cell %d did not end it in time; its last tokens are lost", rid, route.cell)
        if attempt.done() and not attempt.cancelled():
            attempt.exception()  # that it was cut is no news

    async def taken(self, url: str, call: str) -> list[dict[str, Any]]:
        """Everything the engine at `url` still has of the call (engine/kept.py), after ending what runs of it. Empty if
        it has nothing or does not answer."""
        body, timeout = {"call": call}, aiohttp.ClientTimeout(total=TAKE_S)
        try:
            async with self._session.post(f"{url}/gyre/calls/take", json=body, timeout=timeout) as response:
                if response.status == 200:
                    return list(_decoded(await response.read())["tries"])
                reason = f"HTTP {response.status}"
        except (aiohttp.ClientError, TimeoutError, ConnectionError, BadReport) as error:
            reason = f"{type(error).__name__}: {error}"
        log.warning("call %s: the engine at %s does not tell what it generated (%s)", call, url, reason)
        return []

    async def answers(self, url: str) -> bool:
        """Whether a proxy serves at `url`."""
        for _ in range(ANSWER_TRIES):
            try:
                async with self._session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=ANSWER_S)):
                    return True
            except (aiohttp.ClientError, TimeoutError, ConnectionError):
                await asyncio.sleep(FIRST_PAUSE_S)
        return False

    async def _healthy(self, url: str) -> bool:
        try:
            async with self._session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_S)) as response:
                return response.status < 500
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return False

    async def _attempt(
        self, generation: Generation, sampling: Sampling, route: Route, rid: str, key: str, ready: Ready
    ) -> None:
        """One request; returns when the engine's answer ends, be it finished or cut."""
        base = len(generation.ids)
        generation.cell = route.cell
        body = self._body(generation, sampling, rid, key)
        asked_to_stop = False
        await ready()
        try:
            async with self._answer(f"{route.url}/generate", body) as response:
                if response.status != 200:
                    _raise_for(response.status, await response.text())
                async for chunk in _events(response):
                    _take(generation, base, chunk, route.version)
                    if generation.finish:
                        return
                    if generation.stopped and not asked_to_stop:
                        asked_to_stop = True
                        await self._abort(route.url, rid)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineUnavailable(f"{type(error).__name__}: {error}") from error

    @contextlib.asynccontextmanager
    async def _answer(self, url: str, body: InPieces) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response, whose last bytes need not be read inside the block: a connection can be used again only when
        they are, and a call has not to wait for them."""
        response = await self._session.post(url, data=body)
        try:
            yield response
        except BaseException:
            response.close()
            raise
        if response.content.at_eof():
            response.release()
            return
        task = asyncio.create_task(_read_rest(response))
        self._rests.add(task)
        task.add_done_callback(self._rests.discard)

    async def _abort(self, url: str, rid: str) -> None:
        """End one request: its stream then brings what is there, and ends. Without success it just runs on."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionError):
            async with self._session.post(f"{url}/abort_request", json={"rid": rid}) as response:
                await response.read()

    def _body(self, generation: Generation, sampling: Sampling, rid: str, key: str) -> InPieces:
        request: dict[str, Any] = {
            "rid": rid,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_new_tokens": generation.limit - len(generation.ids),
                "stop_token_ids": self._stop_ids,
                "stream_interval": generation.interval,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "stream": True,
        }
        if key:
            request["extra_key"] = key
        first, *others = extended(generation.prompt, np.asarray(generation.ids, dtype=np.int32)) or (b",",)
        head, tail = b'{"input_ids":[', b"]," + orjson.dumps(request)[1:]
        return InPieces((head, memoryview(first)[1:], *others, tail))  # without the first comma


async def _read_rest(response: aiohttp.ClientResponse) -> None:
    """Read to the end, so that the connection serves another call; closed if the end does not come."""
    try:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionError):
            async with asyncio.timeout(REST_S):
                while not response.content.at_eof():
                    await response.content.readany()
    finally:
        response.release()


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The data of a server-sent event stream of JSON objects."""
    buffer = bytearray()
    async for data in response.content.iter_any():
        buffer += data
        while (end := buffer.find(b"\n\n")) >= 0:
            line = bytes(buffer[:end]).strip()
            del buffer[: end + 2]
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield _decoded(line[5:])


def _decoded(data: bytes) -> dict[str, Any]:
    """NaN and infinities, for one, are no JSON."""
    try:
        report = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadReport(f"the engine sent no JSON: {error}") from error
    if not isinstance(report, dict):
        raise BadReport("the engine sent JSON that is no object")
    return report


def _take(generation: Generation, base: int, chunk: dict[str, Any], version: int) -> None:
    """Add one report, and see whether it ends the call."""
    if "error" in chunk:
        _raise_for(int(chunk["error"].get("code") or 400), str(chunk["error"].get("message")))
    meta = chunk["meta_info"]
    generation.take(base, meta, version)
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind in ("stop", "length"):
        generation.finish = kind
    elif kind == "abort" and generation.stopped:
        generation.finish = "stop"
    elif kind == "abort":
        _raise_for_abort(reason)
    if not generation.finish and len(generation.ids) >= generation.limit:
        generation.finish = "length"


def _raise_for_abort(reason: dict[str, Any]) -> None:
    """An abort is a cut (the cell leaves rollout, a client of the engine asked): the call continues elsewhere."""
    status, message = reason.get("status_code"), str(reason.get("message"))
    if isinstance(status, int) and 400 <= status < 500:
        _raise_for(status, message)
    raise Cut(f"cut by the engine: {message}")


def _raise_for(status: int, text: str) -> None:
    if status in (408, 429) or status >= 500:
        raise EngineUnavailable(f"HTTP {status}: {text[:300]}")
    raise EngineRefused(f"HTTP {status}: {text[:300]}")


def is_too_long(error: EngineRefused) -> bool:
    return _TOO_LONG.search(str(error)) is not None
