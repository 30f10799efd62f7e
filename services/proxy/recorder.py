"""From a finished generation to its durable record.

Invariant: `record` returns only when the stream holds the record, and what it returns is in the core already, so the
next call of the execution can continue it. The same call is stored once, however often publishing is tried.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.proxy.core import ProxyCore
from services.proxy.engine_client import Generation
from shared.codec import pack_floats, pack_ids
from shared.events import Event, ModelCallRecorded, Sampling

Publish = Callable[[Event, str], Awaitable[int]]
"""(event, message id) -> stream sequence; returns when the event is durable."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a call that is known before it is generated."""

    call: str
    execution: str
    attempt: int
    parent: str
    keep: int
    call_class: str
    input_ids: npt.NDArray[np.int32]
    sampling: Sampling
    request: str
    opening: str
    diverged: bool
    dialect: str


class Recorder:
    def __init__(self, core: ProxyCore, publish: Publish) -> None:
        self._core, self._publish = core, publish

    async def record(
        self, plan: Plan, generation: Generation, *, context: str, discarded: bool, seconds: float
    ) -> ModelCallRecorded:
        record = ModelCallRecorded(
            call=plan.call,
            execution=plan.execution,
            attempt=plan.attempt,
            cell=generation.cell,
            parent=plan.parent,
            keep=plan.keep,
            call_class=plan.call_class,
            input_ids=pack_ids(plan.input_ids),
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
        )
        await self._publish(record, f"call.{plan.call}")
        self._core.learn(record)
        return record
