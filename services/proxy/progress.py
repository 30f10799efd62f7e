"""Durable notes of one call in flight: its beginning, and what it has generated so far.

Invariant: the notes of a call are published one after the other, each once, and together they are the beginning of its
output without gaps. `begun` is awaited before an engine gets the call; notes on the way are in nobody's way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.proxy.generation import Generation
from services.proxy.plans import Plan
from shared.codec import pack_floats, pack_ids
from shared.events import Event, ModelCallBegun, ModelCallProgressed

log = logging.getLogger("gyre.proxy.progress")

Publish = Callable[[Event, str], Awaitable[int]]
"""(event, message id) -> stream sequence; returns when the event is durable."""


class Progress:
    """`every`: tokens between two notes, 0 = none but those before a change of engines. `noted`: tokens that are
    durable already."""

    def __init__(self, publish: Publish, plan: Plan, take: int, every: int, noted: int = 0) -> None:
        self._publish, self._plan, self._take, self._every = publish, plan, take, every
        self._noted = noted
        self._last: asyncio.Task[None] | None = None

    def begin(self, event: ModelCallBegun) -> None:
        self._then(event, f"begun.{event.call}.{event.take}")

    def grown(self, generation: Generation) -> None:
        """The generation has more tokens."""
        if self._every and len(generation.ids) - self._noted >= self._every:
            self._note(generation)

    async def durable(self, generation: Generation | None = None) -> None:
        """Until everything noted is in the stream; with `generation`, everything that it has."""
        if generation is not None and len(generation.ids) > self._noted:
            self._note(generation)
        if self._last is not None:
            await asyncio.shield(self._last)

    def _note(self, generation: Generation) -> None:
        plan, start = self._plan, self._noted
        self._noted = len(generation.ids)
        event = ModelCallProgressed(
            call=plan.call,
            execution=plan.execution,
            attempt=plan.attempt,
            take=self._take,
            start=start,
            output_ids=pack_ids(generation.ids[start:]),
            output_logprobs=pack_floats(generation.logprobs[start:]),
            versions=tuple(generation.spans),
        )
        self._then(event, f"progress.{plan.call}.{self._take}.{start}")

    def _then(self, event: ModelCallBegun | ModelCallProgressed, msg_id: str) -> None:
        self._last = asyncio.create_task(self._after(self._last, event, msg_id), name=msg_id)
        self._last.add_done_callback(_told)

    async def _after(
        self, before: asyncio.Task[None] | None, event: ModelCallBegun | ModelCallProgressed, msg_id: str
    ) -> None:
        if before is not None:
            await before
        await self._publish(event, msg_id)


def _told(task: asyncio.Task[None]) -> None:
    """A note that failed is raised to whoever waits for it; where nobody does, the log has it."""
    if not task.cancelled() and task.exception() is not None:
        log.warning("%s was not published: %s", task.get_name(), task.exception())
