"""Calls in flight that nobody will ask for again, because their execution is over and their proxy is gone.

Invariant: what such a call generated is recorded, as discarded; where its prompt is nowhere any more, ModelCallDropped
says how many tokens were lost. Calls whose owner lives are the owner's.
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import numpy.typing as npt

from services.proxy.core import Execution, ProxyCore
from services.proxy.flights import Flight
from services.proxy.generating import Generating
from services.proxy.generation import Generation
from services.proxy.plans import plan_of
from services.proxy.recorder import Recorder
from services.proxy.takeover import Takeover
from shared.events import ModelCallBegun

log = logging.getLogger("gyre.proxy.settling")

Ids = npt.NDArray[np.int32]


class Settling:
    def __init__(self, core: ProxyCore, generating: Generating, recorder: Recorder, takeover: Takeover) -> None:
        self._core, self._generating, self._recorder, self._takeover = core, generating, recorder, takeover
        self._tasks: set[asyncio.Task[None]] = set()

    def all_that_are_over(self) -> None:
        """Once, when the history is known."""
        for name in list(self._core.flights.calls):
            execution = self._core.executions.get(name)
            if execution is not None:
                self.attempt(name, execution.attempt if execution.finished else execution.attempt - 1)

    def attempt(self, execution: str, attempt: int) -> None:
        """The attempts up to `attempt` are over."""
        for flight in self._core.flights.of(execution, attempt):
            if not self._takeover.mine(flight):
                task = asyncio.create_task(self._settle(flight), name=f"settle {flight.begun.call}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _settle(self, flight: Flight) -> None:
        try:
            execution = self._core.executions.get(flight.begun.execution)
            if execution is None or not await self._takeover.gone(flight):
                return
            taken = await self._takeover.take(flight)
            if taken is None:
                return
            left = await self._takeover.left_behind(taken)
            if left.prompt is None:
                await self.drop(taken, left.generation)
                return
            plan = plan_of(taken.begun, new_ids(execution, taken.begun, left.prompt))
            await self._generating.settle(plan, left.generation)
        except Exception:  # the edge of the task: nobody waits for it
            log.exception("call %s could not be settled", flight.begun.call)

    async def drop(self, flight: Flight, found: Generation) -> None:
        begun, tokens = flight.begun, len(found.ids)
        reason = "its proxy died, and no engine knows its prompt"
        log.error("call %s: %d generated tokens are lost: %s", begun.call, tokens, reason)
        await self._recorder.drop(begun.call, begun.execution, begun.attempt, tokens=tokens, reason=reason)


def new_ids(execution: Execution, begun: ModelCallBegun, prompt: Ids) -> Ids:
    """What the call adds to the ids that it inherits."""
    parent = execution.contexts.tree.nodes[begun.parent].length if begun.parent else 0
    return prompt[parent if begun.keep < 0 else begun.keep :]
