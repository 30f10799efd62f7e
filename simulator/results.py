"""What a simulated run was like: sums kept while it runs, and the figures made of them."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.cells import DRAINING, JOINING, RETURNING, ROLLOUT, TRAINING
from simulator.setup import Setup

HOUR = 3600.0


@dataclass(frozen=True)
class Result:
    """One run. Idle shares: unused execution places of cells in rollout; cells in training without a micro-step."""

    mode: str
    hours_total: float
    hours_per_step: float
    mean_staleness: float
    rollout_idle: float
    train_idle: float
    group_latency_h: float  # dispatch to ready
    switches: int
    steps: int
    executions: int


class Meter:
    """Time integrals, kept in O(1) per change."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._count = {ROLLOUT: setup.engines, DRAINING: 0, JOINING: 0, TRAINING: 0, RETURNING: 0}
        self._at = 0.0
        self._running = 0
        self._rollout_s = self._training_s = self._running_s = self._trained_s = 0.0
        self._staleness = self._groups = 0
        self._latency = 0.0
        self._ready = 0
        self._finished = 0
        self.commits: list[float] = []

    def _advance(self, now: float) -> None:
        passed = now - self._at
        if passed > 0:
            self._at = now
            self._running_s += passed * self._running
            self._rollout_s += passed * self._count[ROLLOUT]
            self._training_s += passed * (self._count[TRAINING] + self._count[JOINING])

    def run(self, now: float, change: int) -> None:
        self._advance(now)
        self._running += change
        self._finished += change < 0

    def role(self, now: float, previous: str, role: str) -> None:
        self._advance(now)
        self._count[previous] -= 1
        self._count[role] += 1

    def trained(self, seconds: float) -> None:
        self._trained_s += seconds

    def group(self, latency_s: float) -> None:
        self._latency += latency_s
        self._ready += 1

    def consumed(self, staleness: list[int]) -> None:
        self._staleness += sum(staleness)
        self._groups += len(staleness)

    def committed(self, now: float) -> None:
        self.commits.append(now)

    def result(self, now: float, steps: int, phase: str, switches: int) -> Result:
        self._advance(now)
        end = self.commits[-1] if self.commits else now
        places = self._rollout_s * self._setup.capacity
        return Result(
            mode=self._setup.mode if phase == "finished" else f"{self._setup.mode} ({phase})",
            hours_total=end / HOUR,
            hours_per_step=end / HOUR / max(1, steps),
            mean_staleness=self._staleness / max(1, self._groups),
            rollout_idle=max(0.0, 1 - self._running_s / places) if places else 0.0,
            train_idle=max(0.0, 1 - self._trained_s / self._training_s) if self._training_s else 0.0,
            group_latency_h=self._latency / HOUR / max(1, self._ready),
            switches=switches,
            steps=steps,
            executions=self._finished,
        )
