"""Each party is lost at each event of a burst, one at a time, in the world of the real scheduler and agent cores."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import events as ev
from tests.scheduler.world import Plan, World

PLAN = Plan(
    seed=2,
    cells=3,
    capacity=6,
    mu=2,
    phi=0.5,
    groups=3,
    executions=3,
    steps=6,
    supply_fraction=0.34,
    supply_hold_s=0.5,
    evaluate=0,
    mean_s=12.0,
    train_s=1.5,
    switch_s=1.0,
    failures=0.0,
    real_agents=True,
)
PARTIES = ["scheduler", "publisher", *(f"{kind}-{cell}" for kind in ("agent", "part") for cell in range(PLAN.cells))]


def of(world: World, kind: type[ev.Event]) -> list[Any]:
    return [event for event, _ in world.log if isinstance(event, kind)]


def whole_burst(world: World, burst: int) -> range:
    """Counts of the log from the first order of the burst until its cells serve again."""
    log = [event for event, _ in world.log]
    orders = [i for i, e in enumerate(log) if isinstance(e, ev.CellRoleOrdered) and e.burst == burst]
    back = [
        i for i, e in enumerate(log) if isinstance(e, ev.CellRoleChanged) and e.role == "rollout" and i > orders[-1]
    ]
    return range(orders[0] + 1, back[0] + 2)


def books_are_right(world: World) -> None:
    assert world.phase == "finished"
    world.checks.finish()
    steps = [m for commit in of(world, ev.BatchCommitted) for m in commit.micro_steps]
    assert len(steps) == len(set(steps))
    let_go = Counter(r.lease for r in of(world, ev.CallReleased))
    assert max(let_go.values(), default=0) <= 1
    held = [e.lease for e, at in world.log if isinstance(e, ev.CallCut) and e.lease and at + e.hold_s < world.now]
    assert set(held) <= set(let_go)
    assert max(Counter(a.rid for a in of(world, ev.CallAdopted)).values(), default=0) <= 1


def test_the_burst_has_all_steps_of_a_change_of_role() -> None:
    world = World(PLAN).run()
    books_are_right(world)
    kinds = {type(world.log[n - 1][0]) for n in whole_burst(world, 2)}
    assert {
        ev.CallCut,
        ev.CallAdopted,
        ev.CallReleased,
        ev.CellDrained,
        ev.CellJoinedBatch,
        ev.MicroStepTrained,
    } <= kinds
    assert {ev.BatchReduceOrdered, ev.BatchCommitted, ev.BurstEnded, ev.CellRefitted} <= kinds
    assert max(len(e.cells) for e in of(world, ev.BatchReduceOrdered)) > 1


@pytest.mark.parametrize("party", PARTIES)
def test_a_party_is_lost_at_each_event_of_a_burst(party: str) -> None:
    for count in whole_burst(World(PLAN).run(), 2):
        books_are_right(World(replace(PLAN, losses=((count, party),))).run())


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    mode=st.sampled_from(["elastic", "async", "colocate"]),
    losses=st.lists(st.tuples(st.integers(40, 500), st.sampled_from(PARTIES)), min_size=2, max_size=6),
)
def test_several_parties_are_lost(seed: int, mode: str, losses: list[tuple[int, str]]) -> None:
    books_are_right(World(replace(PLAN, seed=seed, mode=mode, losses=tuple(losses))).run())
