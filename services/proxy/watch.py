"""Waiting for the stream: until something the core knows has changed, or until it has seen a sequence.

Invariant: a waiter looks again after every message that the core has handled, so it cannot miss what it waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Watch:
    def __init__(self) -> None:
        self.sequence = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def seen(self, sequence: int) -> None:
        """The core has handled everything up to `sequence`."""
        self.sequence = sequence
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def until(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """The first value of `look` that is not None; None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (found := look()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait({waiter}, timeout=left)
            finally:
                self._waiters.discard(waiter)
        return found
