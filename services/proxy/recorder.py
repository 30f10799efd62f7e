"""From a finished generation to its durable record, and corrections of it.

Invariant: `record` returns only when the stream holds the record, and what it returns is in the core already, so the
next call of the execution can continue it. The same call is stored once, however often publishing is tried. A prompt
too long for one event goes ahead as parts: calls of class auxiliary without output, each continuing the one before.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from services.proxy.core import ProxyCore
from services.proxy.generation import Generation
from services.proxy.plans import Plan
from services.proxy.progress import Progress, Publish
from shared.codec import pack_floats, pack_ids
from shared.events import ModelCallDropped, ModelCallLeft, ModelCallMarked, ModelCallRecorded
from shared.nats_server import MAX_EVENT_BYTES

ROOM_FOR_FIELDS = 64 * 1024


class OutputTooLong(ValueError):
    """An output that fits into no event: model.context and execution.max_new_tokens are out of all proportion."""


class Recorder:
    """`progress`: generated tokens between two durable notes of a call in flight, 0 = none."""

    def __init__(
        self, core: ProxyCore, publish: Publish, *, progress: int = 512, largest: int = MAX_EVENT_BYTES
    ) -> None:
        self._core, self._publish, self._every, self._largest = core, publish, progress, largest

    async def record(
        self,
        plan: Plan,
        generation: Generation,
        *,
        context: str,
        discarded: bool,
        seconds: float,
        delivered: int = -1,
    ) -> ModelCallRecorded:
        record = ModelCallRecorded(
            call=plan.call,
            execution=plan.execution,
            attempt=plan.attempt,
            cell=generation.cell,
            parent=plan.parent,
            keep=plan.keep,
            call_class=plan.call_class,
            input_ids=b"",
            output_ids=pack_ids(generation.ids),
            output_logprobs=pack_floats(generation.logprobs),
            versions=tuple(generation.spans),
            finish_reason=generation.finish or "abort",
            sampling=plan.sampling,
            context=context,
            request=plan.request,
            opening=plan.opening,
            diverged=plan.diverged,
            discarded=discarded,
            cached_tokens=generation.cached_tokens,
            queued_s=generation.queued_s,
            seconds=seconds,
            dialect=plan.dialect,
            delivered=delivered,
        )
        for event in self._in_parts(record, plan.input_ids):
            await self._publish(event, f"call.{event.call}")
            self._core.learn(event)
        return event

    def _in_parts(self, record: ModelCallRecorded, input_ids: npt.NDArray[np.int32]) -> list[ModelCallRecorded]:
        """The record; before it as many parts as its prompt needs."""
        room = (self._largest - ROOM_FOR_FIELDS - len(record.output_ids) - len(record.output_logprobs)) // 4
        if room < 1:
            raise OutputTooLong(f"call {record.call} generated {len(record.output_ids) // 4} tokens")
        events: list[ModelCallRecorded] = []
        parent, keep = record.parent, record.keep
        while len(input_ids) > room:
            part = msgspec.structs.replace(
                record,
                call=f"{record.call}-part{len(events)}",
                parent=parent,
                keep=keep,
                call_class="auxiliary",
                input_ids=pack_ids(input_ids[:room]),
                output_ids=b"",
                output_logprobs=b"",
                versions=(),
                finish_reason="part",
                context="",
                request="",
                delivered=-1,
            )
            events.append(part)
            parent, keep, input_ids = part.call, -1, input_ids[room:]
        last = msgspec.structs.replace(record, parent=parent, keep=keep, input_ids=pack_ids(input_ids))
        return [*events, last]

    def progress(self, plan: Plan, take: int, noted: int = 0) -> Progress:
        """`noted`: tokens that an earlier owner of the call made durable."""
        return Progress(self._publish, plan, take, self._every, noted)

    async def left(self, call: str, execution: str, attempt: int) -> None:
        """Nobody waits for the reply of a call in flight any more."""
        await self._publish(ModelCallLeft(call=call, execution=execution, attempt=attempt), "")

    async def drop(self, call: str, execution: str, attempt: int, *, tokens: int, reason: str) -> None:
        """A call in flight has come to its end without a record."""
        event = ModelCallDropped(call=call, execution=execution, attempt=attempt, tokens=tokens, reason=reason[:500])
        await self._publish(event, f"dropped.{call}")

    async def mark(self, call: str, execution: str, attempt: int, *, discarded: bool) -> None:
        """Correct whether the harness got the reply; returns when that is durable."""
        event = ModelCallMarked(call=call, execution=execution, attempt=attempt, discarded=discarded)
        await self._publish(event, "")
        self._core.mark(event)
