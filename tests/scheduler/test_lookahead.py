"""Lookahead's finer dispatch: the same promises as whole bursts, whatever plans the forecasts choose."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.core import SchedulerCore
from services.scheduler.lookahead import Lookahead
from services.scheduler.notes import Notes
from services.scheduler.state import State
from shared import events as ev
from simulator.setup import Setup
from simulator.workloads import Durations
from simulator.world import World as Simulated
from tests.scheduler.checks import Checks
from tests.scheduler.plans import lookahead_plans
from tests.scheduler.world import Plan, World


@dataclass(frozen=True)
class Told(Lookahead):
    """Lookahead with its choice made for it: bursts of one length, so many cells left free for training."""

    mu: int = 1
    keep: int = 1

    def _best(self, s: State, notes: Notes, burst: int, left: int) -> tuple[int, int, float]:
        fits = self._spend(s, notes, self.mu) >= 0.0
        return (self.mu if fits else 1), self.keep, 0.0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    plan=lookahead_plans(most_steps=12),
    mu=st.integers(1, 4),
    keep=st.integers(1, 4),
)
def test_finer_dispatch_keeps_the_promises(plan: Plan, mu: int, keep: int) -> None:
    """Capacity, prefix order, one place at a time, everything consumed once, the end reached; also with deaths."""
    world = World(plan)
    told = min(keep, plan.cells - 1)
    world.core = SchedulerCore(lambda s: Told(s, mu=mu, keep=told))
    target = (plan.mu - 1) / 2 + plan.phi
    most = max(mu, math.floor(2 * target + 1))
    world.checks = Checks(replace(plan, mode="elastic", mu=most, phi=target + 0.25))
    world.run()
    assert world.phase == "finished"
    world.checks.finish()


SETUP = Setup(
    mode="lookahead", mu=3, phi=0.5, steps=36, cells=6, capacity=24, groups=8, executions=4,
    durations=Durations(1.0, 0.3, 0.3, 3.0), train_work_h=0.7,
)  # fmt: skip


def test_finer_dispatch_goes_out_between_publications_as_places_come_free() -> None:
    published, dispatched, staleness = [0.0], [], []

    def watch(event: Any, now: float) -> None:
        if isinstance(event, ev.BurstEnded):
            published.append(now)
        elif isinstance(event, ev.ExecutionDispatched):
            state = world.core.state
            dispatched.append((now, state.waterlevel, state.live_capacity - 2 * SETUP.capacity))
        elif isinstance(event, ev.BatchSealed):
            staleness.append(event.mean_staleness)

    world = Simulated(SETUP, lambda s: Told(s, mu=3, keep=2), watch)
    world.run()
    between = [d for d in dispatched if d[0] not in published]
    assert len(between) > 40
    assert all(level <= places for _, level, places in between)
    assert sum(staleness) / len(staleness) <= SETUP.staleness + 0.02


def test_the_account_of_staleness_is_the_staleness() -> None:
    """Groups that go out late in a burst start behind; with them the account is still exact."""
    total = 0.0

    def watch(event: Any, now: float) -> None:
        nonlocal total
        if isinstance(event, ev.BatchSealed):
            total += event.mean_staleness * len(event.groups)

    world = Simulated(SETUP, lambda s: Told(s, mu=3, keep=2), watch)
    world.run()
    assert world.core.state.notes is not None
    assert world.core.state.notes.stale_groups == round(total)
