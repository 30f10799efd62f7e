"""One simulated cell: how its executions progress, and what it trains.

Invariant: all executions of a cell progress at one common rate, so its clock is their progress and each needs one heap
entry; a completion is exact, whatever came and went meanwhile. Rate with n executions: 1 / (1 - k + k * n / n0); k is
the share of an execution's time, at n0 executions, that grows in proportion to how many its engine serves.
"""

from __future__ import annotations

import heapq

ROLLOUT, DRAINING, JOINING, TRAINING, RETURNING = "rollout", "draining", "joining", "training", "returning"


class SimCell:
    __slots__ = (
        "at", "busy_until", "clock", "fixed", "heap", "index", "joined", "order", "per_execution", "rate", "role",
        "running", "scheduled", "since", "stamp", "trained_s", "version",
    )  # fmt: skip

    def __init__(self, index: int, load_share: float, load_at: float) -> None:
        self.index = index
        self.fixed = 1.0 - load_share
        self.per_execution = load_share / load_at
        self.role = ROLLOUT
        self.order = 0
        self.since = 0.0  # when it took its role
        self.version = 0
        self.joined: tuple[int, int] | None = None
        self.busy_until = -1.0  # end of the micro-step in work, -1 = idle
        self.trained_s = 0.0
        self.running: dict[str, float] = {}  # execution -> clock at which it is done
        self.heap: list[tuple[float, str]] = []
        self.clock = 0.0
        self.at = 0.0
        self.rate = 1.0
        self.stamp = 0
        self.scheduled = -1.0

    def add(self, name: str, work: float, now: float) -> None:
        self._advance(now)
        done = self.clock + work
        self.running[name] = done
        heapq.heappush(self.heap, (done, name))
        self._set_rate()

    def take(self, name: str, now: float) -> float:
        """Remove the execution; the work that is left."""
        self._advance(now)
        done = self.running.pop(name)
        self._set_rate()
        return max(0.0, done - self.clock)

    def next_done(self) -> tuple[float, str] | None:
        """When the next execution completes if nothing changes, and which."""
        heap, running = self.heap, self.running
        while heap:
            done, name = heap[0]
            if running.get(name) == done:
                return self.at + max(0.0, done - self.clock) / self.rate, name
            heapq.heappop(heap)
        return None

    def _advance(self, now: float) -> None:
        self.clock += (now - self.at) * self.rate
        self.at = now

    def _set_rate(self) -> None:
        self.rate = 1.0 / (self.fixed + self.per_execution * (len(self.running) or 1))
