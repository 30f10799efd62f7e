"""Going on with a call that another process of the proxy left behind.

Invariant: a call is taken over only from an owner that is gone (a newer incarnation of it is ready, or it does not
answer), and by one process: the first whose ModelCallBegun of the next take is in the stream. What was generated is put
together from what the engines kept (services/cell_agent/engine/kept.py) and from the stream; no token is taken twice.
"""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from services.proxy.core import ProxyCore
from services.proxy.engine_client import EngineClient
from services.proxy.flights import Flight
from services.proxy.generation import Generation
from services.proxy.plans import Plan
from services.proxy.progress import Publish
from services.proxy.watch import Watch
from shared.codec import unpack_floats, unpack_ids
from shared.events import ModelCallBegun

log = logging.getLogger("gyre.proxy.takeover")

Ids = npt.NDArray[np.int32]

SEEN_S = 30.0
"""So long the own word may take to come back through the stream."""


@dataclass
class LeftBehind:
    """What is known of a call in flight: `prompt` None if no engine knows it any more."""

    prompt: Ids | None
    generation: Generation


class Takeover:
    """`proxy`, `incarnation`: of this process."""

    def __init__(
        self, core: ProxyCore, engine: EngineClient, publish: Publish, watch: Watch, proxy: str, incarnation: str
    ) -> None:
        self._core, self._engine, self._publish = core, engine, publish
        self.watch = watch
        self._proxy, self._incarnation = proxy, incarnation

    def begun(self, plan: Plan, prompt_tokens: int) -> ModelCallBegun:
        """This process begins a call."""
        return ModelCallBegun(
            call=plan.call,
            execution=plan.execution,
            attempt=plan.attempt,
            proxy=self._proxy,
            incarnation=self._incarnation,
            take=0,
            parent=plan.parent,
            keep=plan.keep,
            call_class=plan.call_class,
            prompt_tokens=prompt_tokens,
            sampling=plan.sampling,
            request=plan.request,
            opening=plan.opening,
            diverged=plan.diverged,
            dialect=plan.dialect,
        )

    def mine(self, flight: Flight) -> bool:
        return (flight.begun.proxy, flight.begun.incarnation) == (self._proxy, self._incarnation)

    async def gone(self, flight: Flight) -> bool:
        """Whether the flight's owner, another process, has ended."""
        begun = flight.begun
        if begun.proxy == self._proxy:
            return begun.incarnation != self._incarnation
        owner = self._core.proxies.get(begun.proxy)
        if owner is None or owner.incarnation != begun.incarnation:
            return True
        dead = not await self._engine.answers(owner.url)
        return dead and flight.begun is begun  # while this process asked, another may have become the owner

    async def take(self, flight: Flight) -> Flight | None:
        """The flight with this process as its owner; None if another one was first, or it has ended."""
        begun = msgspec.structs.replace(
            flight.begun, proxy=self._proxy, incarnation=self._incarnation, take=flight.begun.take + 1
        )
        # A message id of its own for each process: the order in the stream decides, and everybody sees it.
        seq = await self._publish(begun, f"begun.{begun.call}.{begun.take}.{self._proxy}.{self._incarnation}")
        await self.watch.until(lambda: True if self.watch.sequence >= seq else None, SEEN_S)
        now = self._core.flights.find(begun.execution, begun.call)
        return now if now is not None and self.mine(now) and now.begun.take == begun.take else None

    async def left_behind(self, flight: Flight) -> LeftBehind:
        """Ends what still runs of the call at any engine, and collects its output."""
        tries: list[dict[str, Any]] = []
        for number, cell in list(self._core.cells.items()):
            if cell.url:
                kept = await self._engine.taken(cell.url, flight.begun.call)
                tries += [{**one, "cell": number} for one in kept]
        return put_together(flight, tries)


def put_together(flight: Flight, tries: list[dict[str, Any]]) -> LeftBehind:
    """The longest output without gaps. `tries`: what engines kept of the call (kept.py) and their cells, each with
    prompt + the output before it as its prompt."""
    begun = flight.begun
    known = [(np.frombuffer(base64.b64decode(t["prompt"]), "<i4"), t["meta_info"], t["cell"]) for t in tries]
    known = [one for one in known if len(one[0]) >= begun.prompt_tokens]
    known.sort(key=lambda one: len(one[0]))
    generation = Generation((), begun.sampling.max_new_tokens)
    generation.begin_with(
        unpack_ids(flight.ids).tolist(), unpack_floats(flight.logprobs).tolist(), list(flight.versions)
    )
    for ids, meta, cell in known:
        base, rows = len(ids) - begun.prompt_tokens, len(meta["output_token_logprobs"])
        if base > len(generation.ids):
            log.warning("call %s: what came before token %d is nowhere", begun.call, base)
            break
        if base + rows > len(generation.ids):
            generation.take(base, meta, -1)
            generation.cell = cell
        reason = meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, dict) else None
        if base + rows == len(generation.ids) and kind in ("stop", "length"):
            generation.finish = kind
    prompt = known[0][0][: begun.prompt_tokens] if known else None
    return LeftBehind(prompt, generation)
