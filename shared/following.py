"""Waiting for what a core that follows the stream comes to know.

For services that take work items and need facts from the stream beside them: the core is driven by runtime.drive, which
calls `observe`; the tasks that do the work wait on conditions over the core's state.

Invariant: a condition is looked at after every event and whenever it may hold already; nothing polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.bus import Bus
from shared.stored import Stored


class Following:
    def __init__(self) -> None:
        self.live = False
        self.seen = 0  # sequence up to which the core knows the stream
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def go_live(self) -> None:
        """To be given to `drive` as on_live."""
        self.live = True
        self._wake()

    def observe(self, message: Stored) -> None:
        self.seen = message.sequence
        self._wake()

    async def until(self, condition: Callable[[], bool]) -> None:
        if condition():
            return
        entry = (condition, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            self._waiting.remove(entry)

    async def caught_up(self, bus: Bus) -> None:
        """Until the core knows everything that is in the stream now."""
        end = await bus.last_sequence()
        await self.until(lambda: self.seen >= end)

    def _wake(self) -> None:
        for condition, waiter in self._waiting:
            if not waiter.done() and condition():
                waiter.set_result(None)
