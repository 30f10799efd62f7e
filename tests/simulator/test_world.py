"""Simulated runs keep the scheduler's promises, end, consume everything once, and are the same for the same seed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import events as ev
from simulator.setup import Setup
from simulator.workloads import Durations
from simulator.world import World
from tests.scheduler.checks import Checks
from tests.scheduler.plans import lookahead_plans
from tests.scheduler.world import Plan
from tests.scheduler.world import World as ScriptedWorld

MODES = ["elastic", "async", "colocate", "lookahead"]
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}

setups = st.builds(
    Setup,
    mode=st.sampled_from(MODES),
    mu=st.integers(1, 4),
    phi=st.sampled_from([0.0, 0.5, 1.5]),
    steps=st.integers(1, 12),
    cells=st.integers(2, 6),
    standalone=st.sampled_from([0, 0, 2]),
    capacity=st.integers(1, 40),
    groups=st.integers(1, 6),
    executions=st.integers(1, 4),
    durations=st.builds(
        Durations,
        median_h=st.sampled_from([0.01, 1.0]),
        task_sigma=st.sampled_from([0.0, 0.3, 1.0]),
        execution_sigma=st.sampled_from([0.0, 0.5]),
        limit_h=st.sampled_from([0.5, 4.0]),
    ),
    train_work_h=st.sampled_from([0.001, 0.5, 5.0]),
    load_share=st.sampled_from([0.0, 0.3, 1.0]),
    load_at=st.sampled_from([1.0, 8.0]),
    supply_fraction=st.sampled_from([0.0, 0.25, 1.0]),
    supply_hold_s=st.sampled_from([0.0, 60.0]),
    parts=st.integers(1, 3),
    streamed=st.booleans(),
    seed=st.integers(0, 1000),
)


def rules(mode: str, mu: int, phi: float, base: Plan) -> Plan:
    """What the checker is to hold a mode against. Lookahead: elastic's order and capacity rules, and the greatest depth
    that its staleness target allows."""
    if mode != "lookahead":
        return replace(base, mode=mode, mu=mu, phi=phi)
    target = (mu - 1) / 2 + phi
    most = math.floor(2 * target + 1)
    return replace(base, mode="elastic", mu=most, phi=max(0.0, target - (most - 1) / 2) + 0.25 + (mu - 1) / 2)


@settings(max_examples=150, **QUIET)  # type: ignore[arg-type]
@given(setup=setups)
def test_promises_are_kept_and_every_group_is_consumed_once(setup: Setup) -> None:
    base = Plan(
        cells=setup.cells, standalone=setup.standalone, capacity=setup.capacity, groups=setup.groups,
        executions=setup.executions, steps=setup.steps,
    )  # fmt: skip
    checks = Checks(rules(setup.mode, setup.mu, setup.phi, base))

    def watch(event: Any, now: float) -> None:
        checks._check(event)

    result = World(setup, watch=watch).run()
    assert result.steps == setup.steps
    assert result.executions == setup.steps * setup.groups * setup.executions
    checks.finish()


@settings(max_examples=40, **QUIET)  # type: ignore[arg-type]
@given(setup=setups)
def test_same_seed_same_result_byte_for_byte(setup: Setup) -> None:
    def trace(s: Setup) -> bytes:
        log: list[bytes] = []
        result = World(s, watch=lambda event, now: log.append(msgspec.msgpack.encode((now, event)))).run()
        return b"".join(log) + repr(result).encode()

    assert trace(setup) == trace(setup)


@settings(max_examples=60, **QUIET)  # type: ignore[arg-type]
@given(
    plan=lookahead_plans(most_steps=20),
)
def test_lookahead_survives_deaths_and_stops(plan: Plan) -> None:
    world = ScriptedWorld(plan)
    world.checks = Checks(rules("lookahead", plan.mu, plan.phi, plan))
    world.run()
    assert world.phase == "finished"
    world.checks.finish()


SMALL = Setup(
    mode="elastic", mu=3, phi=0.5, steps=36, cells=6, capacity=32, groups=8, executions=4,
    durations=Durations(1.0, 0.3, 0.3, 3.0), train_work_h=0.7, supply_fraction=0.25,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_lookahead_is_no_staler_and_not_slower(seed: int) -> None:
    elastic = World(SMALL.at(seed)).run()
    ahead = World(replace(SMALL, mode="lookahead").at(seed)).run()
    assert ahead.mean_staleness <= SMALL.staleness + 0.01
    assert ahead.hours_per_step <= 1.02 * elastic.hours_per_step


@pytest.mark.parametrize("mode", ["elastic", "async", "colocate"])
def test_staleness_is_what_the_schedule_says(mode: str) -> None:
    mu, phi = {"elastic": (3, 0.5), "async": (1, 1.5), "colocate": (4, 0.0)}[mode]
    staleness: list[float] = []

    def watch(event: Any, now: float) -> None:
        if isinstance(event, ev.BatchSealed):
            staleness.append(event.mean_staleness)

    World(replace(SMALL, mode=mode, mu=mu, phi=phi, steps=96), watch=watch).run()
    steady = staleness[12:-12]
    assert sum(steady) / len(steady) == pytest.approx(1.5, abs=0.02)


def test_executions_slow_down_with_the_load_of_their_cell() -> None:
    """Half of the time grows with the load, measured at 16 per cell: at 32 everything takes half as long again."""
    flat = replace(
        SMALL, durations=Durations(1.0, 0.0, 0.0, 9.0), steps=1, mu=1, phi=0.0, capacity=64, cells=2, groups=16,
        train_work_h=1e-6, mode="colocate", assess_s=0.0, commit_s=0.0,
    )  # fmt: skip
    free = World(flat).run().hours_total
    crowded = World(replace(flat, load_share=0.5, load_at=16.0)).run().hours_total
    assert free == pytest.approx(1.0, abs=0.02)
    assert crowded == pytest.approx(1.5, abs=0.05)


def test_work_is_conserved_when_executions_move() -> None:
    """Moved executions go on where they were: no group takes longer than its own slowest execution and the queue."""
    wide = replace(SMALL, capacity=10_000, assess_s=0.0, to_rollout_s=0.0)
    expected = [max(wide.durations.group(0, g, wide.executions)) for g in range(wide.steps * wide.groups)]
    result = World(wide).run()
    assert result.group_latency_h == pytest.approx(sum(expected) / len(expected), rel=1e-6)
