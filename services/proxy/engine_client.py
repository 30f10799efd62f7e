"""Token ids to an engine and back (SGLang's /generate), across moves, aborts and deaths of engines.

Invariant: every token of a Generation was reported by an engine together with its log-probability, once, in order; what
an engine gave before it was cut is kept, and the next engine continues from prompt + partial. Policy versions are those
the engines reported, as spans over the whole output.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson

from shared.events import Sampling, VersionSpan

log = logging.getLogger("gyre.proxy.engine")

STREAM_INTERVAL = 64  # tokens between two reports of an engine: what a dying engine can lose
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
CONNECT_S = 5.0
_VERSION = re.compile(r"v?(\d+)\Z")
_TOO_LONG = re.compile(r"context length|too long|exceeds?\b.*(?:max|limit|length)|longer than", re.I)


class Route(NamedTuple):
    cell: int
    url: str
    version: int


class EngineUnavailable(Exception):
    """Nobody answers there, or the engine cannot take the call now: another try may work."""


class EngineRefused(Exception):
    """The engine says that this call can never work."""


class NoRoute(Exception):
    """No engine served the call until its deadline."""


@dataclass
class Generation:
    """The output so far. `prompt` int32 [p]; the lists have one entry per generated token."""

    prompt: npt.NDArray[np.int32]
    limit: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: str = ""  # stop, length; "" while it is not finished
    cell: int = -1
    cached_tokens: int = 0
    queued_s: float = 0.0

    def replace_spans(self, base: int, spans: list[tuple[int, int, int]]) -> None:
        """From token `base` on the versions are those of `spans` (version, start, end), as last reported."""
        kept = [VersionSpan(s.version, s.start, min(s.end, base)) for s in self.spans if s.start < base]
        for version, start, end in spans:
            if end <= start:
                continue
            if kept and kept[-1].version == version:
                kept[-1] = VersionSpan(version, kept[-1].start, end)
            else:
                kept.append(VersionSpan(version, start, end))
        self.spans = kept


FindRoute = Callable[[float], Awaitable[Route | None]]
"""(timeout in seconds) -> where the call goes now, None if there was no engine in that time."""


class EngineClient:
    """Pooled connections to all engines."""

    def __init__(self, stop_ids: tuple[int, ...]) -> None:
        self._stop_ids = list(stop_ids)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20)

    async def close(self) -> None:
        await self._session.close()

    async def generate(
        self, generation: Generation, sampling: Sampling, find_route: FindRoute, deadline: float, rid: str
    ) -> None:
        """Fill `generation` to its end. `deadline` in time.monotonic(). Raises NoRoute or EngineRefused."""
        pause, tries = FIRST_PAUSE_S, 0
        while not generation.finish:
            waited = time.monotonic()
            route = await find_route(deadline - waited)
            generation.queued_s += time.monotonic() - waited
            if route is None:
                raise NoRoute
            before = len(generation.ids)
            tries += 1
            try:
                await self._attempt(generation, sampling, route, f"{rid}-{tries}")
            except EngineUnavailable as error:
                log.info("call %s at cell %d (%s): %s", rid, route.cell, route.url, error)
            if generation.finish:
                return
            if time.monotonic() + pause > deadline:
                raise NoRoute
            pause = FIRST_PAUSE_S if len(generation.ids) > before else min(2 * pause, LONGEST_PAUSE_S)
            await asyncio.sleep(pause)
            generation.queued_s += pause

    async def _attempt(self, generation: Generation, sampling: Sampling, route: Route, rid: str) -> None:
        """One request; returns when the engine's answer ends, be it finished or cut."""
        base = len(generation.ids)
        generation.cell = route.cell
        body = self._body(generation, sampling, rid)
        try:
            async with self._session.post(
                f"{route.url}/generate", data=body, headers={"content-type": "application/json"}
            ) as response:
                if response.status != 200:
                    _raise_for(response.status, await response.text())
                async for chunk in _events(response):
                    _take(generation, base, chunk, route.version)
                    if generation.finish:
                        return
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineUnavailable(f"{type(error).__name__}: {error}") from error

    def _body(self, generation: Generation, sampling: Sampling, rid: str) -> bytes:
        partial = np.asarray(generation.ids, dtype=np.int32)
        prompt = np.concatenate((generation.prompt, partial)) if len(partial) else generation.prompt
        request = {
            "rid": rid,
            "input_ids": np.ascontiguousarray(prompt, dtype=np.int32),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_new_tokens": generation.limit - len(generation.ids),
                "stop_token_ids": self._stop_ids,
                "stream_interval": STREAM_INTERVAL,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "stream": True,
        }
        return orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The data of a server-sent event stream of JSON objects."""
    buffer = bytearray()
    async for data in response.content.iter_any():
        buffer += data
        while (end := buffer.find(b"\n\n")) >= 0:
            line = bytes(buffer[:end]).strip()
            del buffer[: end + 2]
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield orjson.loads(line[5:])


def _take(generation: Generation, base: int, chunk: dict[str, Any], version: int) -> None:
    """Add what is new in one report. Reports are cumulative, or hold only the new tokens; the length tells which."""
    if "error" in chunk:
        _raise_for(int(chunk["error"].get("code") or 400), str(chunk["error"].get("message")))
    meta = chunk["meta_info"]
    rows = meta.get("output_token_logprobs") or []
    total = meta.get("output_token_logprobs_length", len(rows))
    fresh = total - (len(generation.ids) - base)
    if fresh > len(rows):
        raise EngineUnavailable(f"the engine reported {total} tokens but showed only {len(rows)}")
    if fresh > 0:
        for row in rows[-fresh:]:
            generation.logprobs.append(row[0])
            generation.ids.append(row[1])
    generation.cached_tokens = max(generation.cached_tokens, meta.get("cached_tokens") or 0)
    _take_versions(generation, base, meta, version)
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind in ("stop", "length"):
        generation.finish = kind
    elif kind == "abort":
        _raise_for_abort(reason)
    if not generation.finish and len(generation.ids) >= generation.limit:
        generation.finish = "length"


def _take_versions(generation: Generation, base: int, meta: dict[str, Any], fallback: int) -> None:
    end = len(generation.ids)
    reported = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": end - base}]
    spans = []
    for span in reported:
        found = _VERSION.match(str(span["version"]))
        number = int(found[1]) if found else fallback
        spans.append((number, base + span["start"], min(base + span["end"], end)))
    generation.replace_spans(base, spans)


def _raise_for_abort(reason: dict[str, Any]) -> None:
    """An abort is a cut (the cell leaves rollout, a client of the engine asked): the call continues elsewhere."""
    status, message = reason.get("status_code"), str(reason.get("message"))
    if isinstance(status, int) and 400 <= status < 500:
        _raise_for(status, message)
    raise EngineUnavailable(f"cut by the engine: {message}")


def _raise_for(status: int, text: str) -> None:
    if status in (408, 429) or status >= 500:
        raise EngineUnavailable(f"HTTP {status}: {text[:300]}")
    raise EngineRefused(f"HTTP {status}: {text[:300]}")


def is_too_long(error: EngineRefused) -> bool:
    return _TOO_LONG.search(str(error)) is not None
