"""How an engine slows down with the executions in its cell, measured from a run's model calls.

Law, as in cells.py: a token takes a + b * n seconds with n executions in the cell. The line is fitted to all calls of a
run, weighted by their tokens; without spread in n, or with a falling line, b is 0: nothing is made of noise.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass
class Presence:
    """How many executions a cell holds, over time: a step function and its integral."""

    times: list[float] = field(default_factory=lambda: [0.0])
    areas: list[float] = field(default_factory=lambda: [0.0])
    counts: list[int] = field(default_factory=lambda: [0])

    def change(self, now: float, by: int) -> None:
        self.areas.append(self._area(now))
        self.counts.append(self.counts[-1] + by)
        self.times.append(now)

    def mean(self, start: float, end: float) -> float:
        if end <= start:
            return float(self.counts[bisect_right(self.times, end) - 1])
        return (self._area(end) - self._area(start)) / (end - start)

    def _area(self, at: float) -> float:
        k = bisect_right(self.times, at) - 1
        return self.areas[k] + self.counts[k] * (at - self.times[k])


@dataclass(frozen=True)
class Call:
    """One model call: seconds in the engine, tokens made, mean number of executions in its cell meanwhile."""

    execution: str
    seconds: float
    tokens: int
    load: float


@dataclass(frozen=True)
class Law:
    """Seconds per token with n executions: fixed + per_execution * n. `at`: the mean load of the calls."""

    fixed: float
    per_execution: float
    at: float

    def stretch(self, load: float) -> float:
        """Seconds at the mean load for one second at `load`."""
        here = self.fixed + self.per_execution * load
        return (self.fixed + self.per_execution * self.at) / here if here > 0 else 1.0

    @property
    def share(self) -> float:
        """Of a call's time at the mean load, what grows with the load."""
        whole = self.fixed + self.per_execution * self.at
        return self.per_execution * self.at / whole if whole > 0 else 0.0


SPREAD = 0.1  # of the mean load; with less there is no line to fit


def fit_law(calls: list[Call]) -> Law:
    """Least squares of seconds per token over the load, weighted by tokens."""
    used = [c for c in calls if c.tokens > 0 and c.seconds > 0]
    weight = float(sum(c.tokens for c in used))
    if not weight:
        return Law(1.0, 0.0, 1.0)
    at = sum(c.tokens * c.load for c in used) / weight
    pace = sum(c.seconds for c in used) / weight
    variance = sum(c.tokens * (c.load - at) ** 2 for c in used) / weight
    if variance < (SPREAD * at) ** 2 or at <= 0:
        return Law(pace, 0.0, max(1.0, at))
    slope = sum(c.tokens * (c.load - at) * (c.seconds / c.tokens - pace) for c in used) / weight / variance
    slope = min(max(0.0, slope), pace / at)
    return Law(pace - slope * at, slope, at)
