"""What an engine generated for each call, kept for a while, so that nothing is lost with the proxy that asked for it.

    POST /gyre/calls/take {"call": id} -> {"tries": [{"rid", "prompt", "meta_info"}, ...]}

All requests of the call (rid = id-NUMBER) that this engine knows, in the order in which they came; `prompt` is the ids
as base64 of little-endian int32, `meta_info` as in the request's own last report. A request that still runs is ended
first. SGLang ends a request whose client has gone; its last report, which nobody reads, is what this is for.

Invariant: a request is known from before its first token until KEEP_S after its end, unless more than KEEP_TOKENS
tokens of prompts and outputs of ended requests are kept: then the oldest go. Outputs hold every token that the engine's
own counter has.
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import numpy.typing as npt

PATH = "/gyre/calls/take"
KEEP_S = 900.0
KEEP_TOKENS = 16 * 2**20  # at most 64 MB of prompts and 128 MB of outputs
END_S = 30.0  # so long a request may take to end: a prefill is not interrupted
LOOK_S = 0.01
_NUMBER = re.compile(r"-\d+\Z")
_META = ("finish_reason", "weight_version", "weight_versions", "cached_tokens")


class Request:
    """One request: SGLang's own state until it has ended and was packed, arrays afterwards."""

    def __init__(self, rid: str, state: Any) -> None:
        self.rid, self._state = rid, state
        self._last: dict[str, Any] | None = None  # the report that a reader took last
        self._meta: dict[str, Any] = {}
        self._prompt: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._logprobs: npt.NDArray[np.float64] = np.empty(0, np.float64)
        self.ended_at = 0.0  # set when packed

    @property
    def ended(self) -> bool:
        return self._state is None or bool(self._state.finished)

    @property
    def tokens(self) -> int:
        return len(self._prompt) + len(self._ids)

    def reported(self, report: dict[str, Any]) -> None:
        self._last = report

    def pack(self, now: float) -> None:
        """Let go of SGLang's objects: 40 bytes a token become 4 and 12."""
        state = self._state
        if state is None:
            return
        unread = state.out_list
        report = unread[-1] if unread else self._last or {}
        meta = report.get("meta_info", {})
        rows = meta.get("output_token_logprobs") or []
        self._meta = {key: meta[key] for key in _META if key in meta}
        self._ids = np.fromiter((row[1] for row in rows), np.int32, len(rows))
        self._logprobs = np.fromiter((row[0] for row in rows), np.float64, len(rows))
        self._prompt = np.asarray(state.obj.input_ids or [], dtype="<i4")
        self._state, self._last, self.ended_at = None, None, now

    def plain(self) -> dict[str, Any]:
        rows = [[p, t, None] for p, t in zip(self._logprobs.tolist(), self._ids.tolist(), strict=True)]
        meta = {**self._meta, "output_token_logprobs": rows, "output_token_logprobs_length": len(rows)}
        return {"rid": self.rid, "prompt": base64.b64encode(self._prompt.tobytes()).decode(), "meta_info": meta}


class Kept:
    """The requests of one engine. A look at them costs no more than the number of those that run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, Request] = {}
        self._ended: dict[str, Request] = {}  # packed, in the order in which they were
        self._tokens = 0  # of those

    def came(self, rid: str, state: Any) -> Request:
        for request in [r for r in self._running.values() if r.ended]:
            self.packed(request)
        self._forget()
        self._drop(rid)
        request = self._running[rid] = Request(rid, state)
        return request

    def packed(self, request: Request) -> None:
        """The request has ended."""
        if self._running.get(request.rid) is request:
            del self._running[request.rid]
            request.pack(self._clock())
            self._ended[request.rid] = request
            self._tokens += request.tokens

    def never_began(self, request: Request) -> None:
        if self._running.get(request.rid) is request:
            del self._running[request.rid]

    async def take(self, call: str, manager: Any) -> list[dict[str, Any]]:
        """Raises TimeoutError if a request of the call does not end in time."""
        async with asyncio.timeout(END_S):
            for request in [r for r in self._running.values() if _call(r.rid) == call]:
                while not request.ended:
                    manager.abort_request(rid=request.rid)
                    await asyncio.sleep(LOOK_S)
                self.packed(request)
        return [request.plain() for request in self._ended.values() if _call(request.rid) == call]

    def _forget(self) -> None:
        oldest_allowed = self._clock() - KEEP_S
        while self._ended:
            rid, request = next(iter(self._ended.items()))
            if self._tokens <= KEEP_TOKENS and request.ended_at >= oldest_allowed:
                return
            self._drop(rid)

    def _drop(self, rid: str) -> None:
        request = self._ended.pop(rid, None)
        if request is not None:
            self._tokens -= request.tokens


def _call(rid: str) -> str:
    return _NUMBER.sub("", rid)


def install(http_server: Any) -> None:
    """Add the route to SGLang's application and watch its requests; before the server starts."""
    from fastapi.responses import JSONResponse
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    kept = Kept()

    async def take(body: dict[str, str]) -> Any:
        manager = http_server._global_state.tokenizer_manager
        try:
            return JSONResponse({"tries": await kept.take(body["call"], manager)})
        except TimeoutError:
            return JSONResponse({"error": "a request of the call does not end"}, status_code=503)

    http_server.app.add_api_route(PATH, take, methods=["POST"])
    watch(TokenizerManager, kept)


def watch(manager_class: Any, kept: Kept) -> None:
    """Wrap the two methods between which a request lives (SGLang 0.5.23)."""
    init, generate = manager_class._init_req_state, manager_class.generate_request

    def init_req_state(self: Any, obj: Any, request: Any = None) -> None:
        init(self, obj, request)
        if _ours(obj):
            obj.gyre_kept = kept.came(obj.rid, self.rid_to_state[obj.rid])

    async def generate_request(self: Any, obj: Any, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        reports = generate(self, obj, request)
        mine: Request | None = None
        try:
            async for report in reports:
                mine = mine or getattr(obj, "gyre_kept", None)
                if mine is not None:
                    mine.reported(report)
                yield report
        finally:
            await reports.aclose()
            mine = mine or getattr(obj, "gyre_kept", None)
            if mine is not None and mine.ended:
                kept.packed(mine)
            elif mine is not None and obj.rid not in self.rid_to_state:
                kept.never_began(mine)

    manager_class._init_req_state, manager_class.generate_request = init_req_state, generate_request


def _ours(obj: Any) -> bool:
    """A single request that reports log-probabilities, as calls of the proxy do."""
    rid = getattr(obj, "rid", None)
    return isinstance(rid, str) and _NUMBER.search(rid) is not None and bool(getattr(obj, "return_logprob", False))
