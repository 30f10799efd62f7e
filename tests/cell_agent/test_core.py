"""The cell core: one behaviour each, and random worlds in which cells die, lag and are given claims twice."""

import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.cell_agent import commands as do
from services.cell_agent.core import CellCore, NeverTrains, State
from services.cell_agent.roles import Role
from shared import events as ev
from shared.actor import Do, Publish
from shared.events import Event
from tests.cell_agent.scripted import ScriptedWorld, weights_of


def played(core: CellCore, *events: Event) -> tuple[list[do.Command], list[Event]]:
    """Commands and published events of the last event."""
    effects = [core.handle(event, 100.0 + i) for i, event in enumerate(events)][-1]
    return (
        [e.command for e in effects if isinstance(e, Do)],  # type: ignore[misc]
        [e.event for e in effects if isinstance(e, Publish)],
    )


def started(cell: int, incarnation: str = "") -> ev.CellStarted:
    return ev.CellStarted(cell=cell, incarnation=incarnation or f"c{cell}")


def trainer_ready(cell: int, version: int = 0) -> ev.CellTrainerReady:
    return ev.CellTrainerReady(cell=cell, incarnation=f"c{cell}", version=version, store=f"store{cell}")


def engine_ready(cell: int, version: int = 0) -> ev.CellEngineReady:
    return ev.CellEngineReady(cell=cell, incarnation=f"c{cell}", url="u", version=version, capacity=4)


def ordered(cell: int, order: int, role: str, version: int = 0) -> ev.CellRoleOrdered:
    return ev.CellRoleOrdered(cell=cell, order=order, role=role, burst=1, version=version, reason="")


def opened(batch: int = 1, attempt: int = 1, base: int = 0) -> ev.BatchOpened:
    return ev.BatchOpened(batch=batch, attempt=attempt, base_version=base, groups=2, burst=1)


def joined(cell: int, batch: int = 1, attempt: int = 1) -> ev.CellJoinedBatch:
    return ev.CellJoinedBatch(
        cell=cell, incarnation=f"c{cell}", batch=batch, attempt=attempt, version=0, pull_seconds=0.0
    )


def test_a_standalone_engine_serves_without_a_trainer_takes_weights_and_is_never_ordered_to_train() -> None:
    core = CellCore(2, trains=False)
    told = [started(0), trainer_ready(0), started(2)]
    commands, _ = played(core, *told)
    assert [type(c) for c in commands] == [do.BringUp, do.Admit]
    commands, events = played(core, engine_ready(2))
    assert [(e.role, e.previous) for e in events if isinstance(e, ev.CellRoleChanged)] == [("rollout", "offline")]
    committed = ev.BatchCommitted(
        batch=1, attempt=1, version=1, cells=(0,), micro_steps=(), checkpoint="c", seconds=0.0, metrics={}
    )
    commands, _ = played(core, opened(), weights_of(1, "c0"), committed, ev.RefitOrdered(cell=2, version=1))
    assert commands == [do.Refit(incarnation="c2", weights=weights_of(1, "c0"))]
    with pytest.raises(NeverTrains, match="standalone"):
        core.handle(ordered(2, 1, "training"), 200.0)


def trained(cell: int, micro_step: str, incarnation: str = "") -> ev.MicroStepTrained:
    return ev.MicroStepTrained(
        micro_step=micro_step,
        batch=1,
        attempt=1,
        cell=cell,
        incarnation=incarnation or f"c{cell}",
        tokens=1,
        seconds=0.0,
        metrics={},
    )


def sealed(*micro_steps: str) -> ev.BatchSealed:
    return ev.BatchSealed(
        batch=1, groups=("g",), executions=8, micro_steps=micro_steps, mean_reward=0.0, mean_staleness=0.0
    )


def committed(*micro_steps: str, version: int = 1) -> ev.BatchCommitted:
    return ev.BatchCommitted(
        batch=version,
        attempt=1,
        version=version,
        cells=(0,),
        micro_steps=micro_steps,
        checkpoint=f"ck{version}",
        seconds=0.0,
        metrics={},
    )


def reduce_ordered(*cells: int) -> ev.BatchReduceOrdered:
    return ev.BatchReduceOrdered(batch=1, attempt=1, cells=cells, executions=8)


def drained(cell: int, order: int) -> ev.CellDrained:
    return ev.CellDrained(cell=cell, incarnation=f"c{cell}", order=order, seconds=0.0)


UP = (started(0), started(1), trainer_ready(0), weights_of(0, "c0"), trainer_ready(1), engine_ready(0), engine_ready(1))
SATELLITE_TRAINS = (*UP, ordered(1, 1, "training"), opened(), drained(1, 1), joined(1))
CORE_TRAINS = (*UP, ordered(0, 1, "training"), drained(0, 1), opened(), joined(0))


def test_a_new_incarnation_is_brought_up_from_the_last_commit():
    core = CellCore(0)
    commands, _ = played(core, committed("m"), started(0))
    assert commands == [do.BringUp(incarnation="c0", version=1, checkpoint="ck1")]


def test_at_version_0_the_engine_is_admitted_without_weights():
    core = CellCore(1)
    commands, _ = played(core, started(1))
    assert commands[1] == do.Admit(incarnation="c1", weights=None)


def test_a_late_engine_waits_for_the_live_core_s_weights():
    core = CellCore(1)
    stale = weights_of(1, "c0")
    commands, _ = played(core, started(0), stale, committed("m"), started(0, "new"), started(1))
    assert [type(c) for c in commands] == [do.BringUp]
    fresh = weights_of(1, "new")
    commands, _ = played(core, fresh)
    assert commands == [do.Admit(incarnation="c1", weights=fresh)]


def test_a_slow_engine_is_admitted_with_newer_weights_when_its_own_are_overtaken():
    """The core keeps two snapshots; what has left cannot be pulled any more."""
    core = CellCore(1)
    first = weights_of(1, "c0")
    commands, _ = played(core, started(0), committed("m"), first, started(1))
    assert commands[-1] == do.Admit(incarnation="c1", weights=first)
    second, third = weights_of(2, "c0"), weights_of(3, "c0")
    assert played(core, second)[0] == []
    assert [type(c) for c in played(core, committed("m", version=2))[0]] == [do.Settle]
    assert played(core, third)[0] == [do.Admit(incarnation="c1", weights=second)]


def test_a_slow_refit_is_asked_for_again_when_its_weights_are_overtaken():
    core = CellCore(1)
    refit = ev.RefitOrdered(cell=1, version=1)
    first, second, third = (weights_of(v, "c0") for v in (1, 2, 3))
    commands, _ = played(core, *UP, first, committed("m"), refit)
    assert commands == [do.Refit(incarnation="c1", weights=first)]
    assert played(core, second)[0] == []
    assert [type(c) for c in played(core, committed("m", version=2))[0]] == [do.Settle]
    assert played(core, third)[0] == [do.Refit(incarnation="c1", weights=second)]
    old = ev.CellRefitted(cell=1, incarnation="c1", version=1, seconds=0.0)
    assert played(core, old)[0] == []  # it came just in time after all: the newer one is still under way


def test_rollout_begins_when_engine_and_trainer_stand():
    core = CellCore(1)
    _, published = played(core, *UP)
    assert [e.role for e in published] == ["rollout"]


def test_the_training_order_drains_first():
    core = CellCore(1)
    commands, published = played(core, *UP, ordered(1, 1, "training"))
    assert commands == [do.Drain(incarnation="c1", order=1)]
    assert [(e.previous, e.role, e.order) for e in published] == [("rollout", "draining", 1)]


def test_a_drained_core_trains_before_a_batch_is_open():
    core = CellCore(0)
    _, published = played(core, *UP, ordered(0, 1, "training"), drained(0, 1))
    assert [e.role for e in published] == ["joining", "training"]


def test_a_satellite_joins_with_the_core_s_snapshot_and_claims_after_it_joined():
    core = CellCore(1)
    commands, _ = played(core, *UP, ordered(1, 1, "training"), opened(), drained(1, 1))
    assert commands == [do.Join(incarnation="c1", batch=1, attempt=1, version=0, weights=weights_of(0, "c0"))]
    commands, published = played(core, joined(1))
    assert commands == [do.Claim(incarnation="c1", batch=1, attempt=1, sealed=False)]
    assert [e.role for e in published] == ["training"]


def test_a_satellite_waits_for_a_batch_to_join():
    core = CellCore(1)
    commands, _ = played(core, *UP, ordered(1, 1, "training"), drained(1, 1))
    assert commands == []
    commands, _ = played(core, opened())
    assert [type(c) for c in commands] == [do.Join]


def test_an_older_order_is_ignored():
    core = CellCore(1)
    played(core, *UP, ordered(1, 5, "training"))
    commands, published = played(core, ordered(1, 4, "rollout"))
    assert (commands, published) == ([], [])
    assert core.state.role is Role.DRAINING


def test_a_rollout_order_calls_the_drain_off():
    core = CellCore(1)
    commands, published = played(core, *UP, ordered(1, 1, "training"), ordered(1, 2, "rollout"))
    assert [type(c) for c in commands] == [do.CancelDrain]
    assert [e.role for e in published] == ["returning", "rollout"]
    commands, published = played(core, drained(1, 1))
    assert (commands, published) == ([], [])


def test_the_core_commits_what_was_trained_once():
    core = CellCore(0)
    played(core, *CORE_TRAINS, joined(1), trained(0, "m0"), trained(1, "m1"), sealed("m0", "m1"))
    commands, _ = played(core, reduce_ordered(0, 1))
    assert commands == [
        do.Commit(
            incarnation="c0",
            batch=1,
            attempt=1,
            group="e0_0-c0_1-c1",
            rank=0,
            cells=(0, 1),
            store="store0",
            ours=("m0",),
            executions=8,
            version=1,
            micro_steps=("m0", "m1"),
        )
    ]


def test_a_satellite_reduces_with_the_core_s_store():
    core = CellCore(1)
    played(core, *SATELLITE_TRAINS, trained(1, "m0"), sealed("m0"))
    commands, _ = played(core, reduce_ordered(0, 1))
    assert commands == [
        do.Reduce(
            incarnation="c1",
            batch=1,
            attempt=1,
            group="e0_0-c0_1-c1",
            rank=1,
            cells=(0, 1),
            store="store0",
            ours=("m0",),
        )
    ]


def test_a_group_in_which_a_reduction_was_given_up_is_never_used_again():
    core = CellCore(1)
    played(core, *SATELLITE_TRAINS, trained(1, "m0"), sealed("m0"), reduce_ordered(0, 1), opened(attempt=2))
    again = [msgspec.structs.replace(e, attempt=2) for e in (joined(1), trained(1, "m0"), reduce_ordered(0, 1))]
    commands, _ = played(core, *again)
    assert commands[-1].group == "e1_0-c0_1-c1"


def test_a_reduction_that_lacks_a_micro_step_is_refused():
    core = CellCore(0)
    played(core, *CORE_TRAINS, trained(0, "m0"), trained(1, "m1"), sealed("m0", "m1"))
    commands, _ = played(core, reduce_ordered(0))
    assert [type(c) for c in commands] == [do.Restart]
    assert "m1" in commands[0].reason


def test_a_lost_satellite_s_gradients_do_not_count():
    core = CellCore(0)
    played(core, *CORE_TRAINS, trained(1, "m0"), sealed("m0"), started(1, "again"))
    assert core.state.trained == {}
    assert not core.trained_elsewhere("m0")


def test_acknowledged_only_when_committed():
    core = CellCore(1)
    commands, _ = played(core, *SATELLITE_TRAINS, trained(1, "m0"), sealed("m0"), reduce_ordered(0, 1))
    assert not any(isinstance(c, do.Settle) for c in commands)
    commands, _ = played(core, committed("m0"))
    assert commands == [do.Settle(incarnation="c1", batch=1, micro_steps=("m0",))]


def test_a_new_attempt_abandons_the_old_one_and_joins_again():
    core = CellCore(1)
    commands, _ = played(core, *SATELLITE_TRAINS, trained(1, "m0"), opened(attempt=2))
    assert [type(c) for c in commands] == [do.Abandon, do.Join]
    assert commands[1].attempt == 2


def test_the_core_s_death_voids_the_attempt():
    core = CellCore(1)
    commands, _ = played(core, *SATELLITE_TRAINS, trained(1, "m0"), started(0, "again"))
    assert [type(c) for c in commands] == [do.Abandon]
    commands, _ = played(core, opened(attempt=2))
    assert commands == [], "its snapshot is not there yet"
    commands, _ = played(core, weights_of(0, "again"))
    assert [type(c) for c in commands] == [do.Join]


def test_a_rollout_order_waits_for_the_batch_that_counts_on_us():
    core = CellCore(1)
    commands, published = played(core, *SATELLITE_TRAINS, trained(1, "m0"), ordered(1, 2, "rollout", version=1))
    assert (commands, published) == ([], [])
    fresh = weights_of(1, "c0")
    commands, published = played(core, fresh, committed("m0"))
    assert [type(c) for c in commands] == [do.Settle, do.Refit]
    assert [e.role for e in published] == ["returning"]
    refitted = ev.CellRefitted(cell=1, incarnation="c1", version=1, seconds=0.0)
    _, published = played(core, refitted)
    assert [(e.role, e.version) for e in published] == [("rollout", 1)]


def test_the_next_batch_of_a_burst_is_joined_without_an_order():
    core = CellCore(1)
    played(core, *SATELLITE_TRAINS, trained(1, "m0"), sealed("m0"), weights_of(1, "c0"), committed("m0"))
    commands, _ = played(core, opened(batch=2, base=1))
    assert commands == [do.Join(incarnation="c1", batch=2, attempt=1, version=1, weights=weights_of(1, "c0"))]


def test_a_refit_in_service_needs_no_role_change():
    core = CellCore(1)
    played(core, *UP, weights_of(1, "c0"), committed())
    commands, published = played(core, ev.RefitOrdered(cell=1, version=1))
    assert [type(c) for c in commands] == [do.Refit]
    assert published == []


def test_one_refit_at_a_time():
    core = CellCore(1)
    played(core, *UP, weights_of(1, "c0"), committed(), ev.RefitOrdered(cell=1, version=1))
    played(core, weights_of(2, "c0"), committed(version=2))
    commands, _ = played(core, ev.RefitOrdered(cell=1, version=2))
    assert commands == []
    commands, _ = played(core, ev.CellRefitted(cell=1, incarnation="c1", version=1, seconds=0.0))
    assert [c.weights.version for c in commands] == [2]


def test_an_order_to_a_cell_whose_engine_is_not_up_is_obeyed():
    core = CellCore(1)
    commands, published = played(core, *UP[:5], ordered(1, 1, "training"))
    assert [e.role for e in published] == ["joining"]
    commands, _ = played(core, opened())
    assert [type(c) for c in commands] == [do.Join]


def test_the_core_exports_the_policy_once():
    core = CellCore(0)
    commands, _ = played(core, *UP, ev.RunPhaseChanged(phase="eval_after"))
    assert [type(c) for c in commands] == [do.Count, do.Export]
    commands, _ = played(core, ev.PolicyExported(version=0, path="p"), ev.RunPhaseChanged(phase="finished"))
    assert [type(c) for c in commands] == [do.Count]


def test_a_death_inside_the_reduction_is_told():
    core = CellCore(0)
    played(core, *CORE_TRAINS, trained(0, "m0"), trained(1, "m1"), sealed("m0", "m1"), reduce_ordered(0, 1))
    commands, _ = played(core, started(1, "again"))
    assert commands == [do.LostMember(incarnation="c0", cell=1, batch=1, attempt=1)]


def test_a_snapshot_holds_the_whole_state():
    core = CellCore(1)
    played(core, *SATELLITE_TRAINS, trained(1, "m0"), sealed("m0"))
    again = CellCore(1)
    again.restore(core.snapshot())
    assert again.state == core.state
    assert played(again, committed("m0")) == played(core, committed("m0"))
    assert msgspec.msgpack.decode(core.snapshot(), type=State) == core.state


MOVES = st.one_of(
    st.tuples(st.just("deliver"), st.integers(0, 2)),
    st.tuples(st.just("deliver"), st.integers(0, 2)),
    st.tuples(st.just("act"), st.integers(0, 2)),
    st.tuples(st.just("claim"), st.integers(0, 2)),
    st.tuples(st.just("train"), st.integers(0, 2)),
    st.tuples(st.just("drained"), st.integers(0, 2)),
    st.tuples(st.just("schedule"), st.just(0)),
    st.tuples(st.just("schedule"), st.just(0)),
    st.tuples(st.just("twice"), st.integers(0, 2)),
    st.tuples(st.just("die"), st.integers(0, 2)),
    st.tuples(st.just("rollout"), st.integers(1, 2)),
)


def run_world(moves: list[tuple[str, int]], cells: int = 3) -> ScriptedWorld:
    world = ScriptedWorld(cells)
    for cell in range(cells):
        world.start(cell)
    for move, cell in moves:
        match move:
            case "schedule":
                world.scheduler.act()
            case "twice":
                world.claim(cell, twice=True)
            case "die":
                world.start(cell)
            case "rollout":
                world.scheduler.order(cell, "rollout")
            case _:
                getattr(world, move)(cell)
    world.settle_down()
    return world


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(MOVES, max_size=250))
def test_whatever_happens_each_micro_step_is_in_one_committed_gradient(moves):
    """The scripted commit asserts that the sum holds each listed micro-step once; here: that all batches get there."""
    assert run_world(moves).committed == [1, 2, 3]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_the_same_in_long_histories(seed):
    rng = random.Random(seed)
    common = ["deliver"] * 12 + ["act"] * 5 + ["claim", "train", "schedule"] * 4 + ["drained"] * 2 + ["twice"]
    rare = ["die"] * rng.choice([0, 1]) + ["rollout"] * rng.choice([0, 1])
    moves = rng.choices(common * 3 + rare, k=rng.randint(100, 1500))
    run_world([(move, rng.randrange(1 if move == "rollout" else 0, 3)) for move in moves])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(MOVES, max_size=200))
def test_roles_are_told_in_the_order_of_the_table_and_orders_never_fall(moves):
    from services.cell_agent.roles import TABLE

    world = run_world(moves)
    roles: dict[str, Role] = {}
    orders: dict[int, int] = {}
    for event in world.stream:
        if isinstance(event, ev.CellRoleChanged):
            before = roles.get(event.incarnation, Role.OFFLINE)
            assert event.previous == before
            assert Role(event.role) in {*TABLE[before].values(), before}
            roles[event.incarnation] = Role(event.role)
            assert event.order >= orders.get(event.cell, 0)
            orders[event.cell] = event.order


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(MOVES, max_size=150))
def test_a_replay_gives_the_same_effects(moves):
    world = run_world(moves)
    for cell in range(3):
        again = CellCore(cell)
        for at, event in enumerate(world.stream[: world.read[cell]]):
            again.handle(event, float(at + 1))
        assert again.state == world.cores[cell].state


def test_snapshots_are_asked_of_live_cells_other_than_the_core_and_oneself():
    core = CellCore(1)

    def ready(cell: int) -> ev.CellEngineReady:
        return ev.CellEngineReady(
            cell=cell, incarnation=f"c{cell}", url="u", version=0, capacity=4, offers=f"host:{cell}"
        )

    played(core, *(started(k) for k in range(4)), *(ready(k) for k in range(4)))
    assert core.sources() == ("host:2", "host:3")
    played(core, started(2, "again"))
    assert core.sources() == ("host:3",)
    played(core, ready(2))  # of the incarnation that is lost
    assert core.sources() == ("host:3",)
