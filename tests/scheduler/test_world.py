"""Whole runs in the scripted world: promises kept, the end reached, replay and snapshots exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.core import SchedulerCore
from shared import events as ev
from tests.scheduler.world import Plan, World, encode_effects

MODES = ["elastic", "async", "colocate"]

plans = st.builds(
    Plan,
    seed=st.integers(0, 10**6),
    mode=st.sampled_from(MODES),
    cells=st.integers(2, 6),
    standalone=st.sampled_from([0, 0, 1, 3]),
    capacity=st.integers(1, 12),
    mu=st.integers(1, 4),
    phi=st.sampled_from([0.0, 0.25, 0.5, 1.5]),
    groups=st.integers(1, 5),
    executions=st.integers(1, 4),
    steps=st.integers(0, 8),
    supply_fraction=st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]),
    supply_hold_s=st.sampled_from([0.0, 1.0, 30.0]),
    streaming=st.sampled_from([True, True, False]),
    evaluate=st.sampled_from([0, 1, 5, 7]),
    mean_s=st.sampled_from([2.0, 60.0]),
    train_s=st.sampled_from([0.2, 2.0, 20.0]),
    deaths_per_hour=st.sampled_from([0.0, 0.0, 20.0, 120.0]),
    stops=st.integers(0, 2),
    failures=st.sampled_from([0.0, 0.1, 1.0]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=plans)
def test_every_run_ends_with_everything_consumed_once(plan: Plan) -> None:
    world = World(plan).run()
    assert world.phase == "finished"
    world.checks.finish()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=plans, cut=st.floats(0, 1))
def test_replay_and_snapshot_give_the_same_effects(plan: Plan, cut: float) -> None:
    world = World(plan).run()
    again, where = SchedulerCore(), 1 + int(cut * (len(world.log) - 2))
    for i, (event, now) in enumerate(world.log):
        if i == where:
            restored = SchedulerCore()
            restored.restore(again.snapshot())
            again = restored
        assert encode_effects(again.handle(event, now)) == world.effects[i]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=plans, cells=st.integers(1, 3), standalone=st.integers(1, 4), mode=st.sampled_from([*MODES, "lookahead"]))
def test_standalone_engines_only_ever_roll_out(plan: Plan, cells: int, standalone: int, mode: str) -> None:
    """Also where they are the majority, or the core is the only cell that trains."""
    world = World(replace(plan, cells=cells, standalone=standalone, mode=mode)).run()
    assert world.phase == "finished"
    world.checks.finish()  # `checks` holds every order and every move against what standalone engines are for
    roles = {(e.cell, e.role) for e, _ in world.log if isinstance(e, ev.CellRoleChanged) and e.cell >= cells}
    assert roles <= {(k, "rollout") for k in range(cells, cells + standalone)}


@pytest.mark.parametrize("mode", MODES)
def test_steady_state_staleness_is_the_papers(mode: str) -> None:
    mu, phi = {"elastic": (3, 0.5), "async": (1, 1.5), "colocate": (4, 0.0)}[mode]
    plan = Plan(mode=mode, mu=mu, phi=phi, groups=8, executions=2, steps=48, cells=4, capacity=10)
    world = World(plan).run()
    steady = world.checks.staleness[2 * mu : 48 - 48 % mu - mu]
    assert sum(steady) / len(steady) == pytest.approx((mu - 1) / 2 + phi, abs=0.02)


def test_satellites_join_in_elastic_mode() -> None:
    world = World(Plan(steps=12, cells=5, capacity=10, groups=8, train_s=10.0, mean_s=20.0)).run()
    assert world.phase == "finished"
    assert set(world.checks.joins) >= {0, 1, 2}
