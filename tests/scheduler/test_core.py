"""Single behaviours of the scheduler's core, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.core import NotStarted, SchedulerCore
from shared import events as ev
from shared.actor import Wake
from tests.scheduler.by_hand import Hand
from tests.scheduler.world import Plan

# Three cells of four places, batches of two groups of two executions: (0.5 + 2) * 2 = 5 groups at a boundary.
SMALL = Plan(cells=3, capacity=4, mu=2, phi=0.5, groups=2, executions=2, steps=4, supply_hold_s=5.0, evaluate=0)


def in_training() -> Hand:
    """Batch 1 is open, the core joined it, cell 1 too; groups 0 and 1 are assigned with a micro-step each."""
    h = Hand(SMALL).all_up()
    for group in range(4):
        h.group_done(group)
    h.give(ev.TimerFired(service="scheduler", key="supply"), at=h.now + 10)
    h.role(0, "draining").role(0, "training")
    assert h.names() == ["batch_opened", "cell_role_ordered"]  # the two executions left fit into cell 2
    h.joined(0, 1).role(1, "joining").joined(1, 1).role(1, "training")
    return h.assign(0, 1).assign(1, 1).seal(1, [0, 1], ["g000000-0", "g000001-0"])


def test_a_run_starts_when_all_cells_are_ready() -> None:
    h = Hand(SMALL)
    assert h.names() == ["run_phase_changed"]
    h.up(0, 1)
    assert [e.phase for e in h.all(ev.RunPhaseChanged)] == ["starting"]
    h.up(2)
    assert [e.phase for e in h.all(ev.RunPhaseChanged)] == ["starting", "eval_before", "training"]


def test_dispatch_depth_and_placement_at_the_latest_cells_first() -> None:
    h = Hand(SMALL).all_up()
    assert len(h.all(ev.ExecutionDispatched)) == 5 * 2
    assert [e.cell for e in h.all(ev.ExecutionPlaced)] == [2] * 4 + [1] * 4 + [0] * 2
    assert len({e.group for e in h.all(ev.ExecutionDispatched)}) == 5


def test_core_leaves_by_capacity_and_supply_and_its_executions_move_first() -> None:
    h = Hand(SMALL).all_up()
    h.finish("g000000x00")  # 9 left, the others hold 8
    h.finish("g000000x01")  # 8 left, but no supply
    assert h.names() == []
    h.give(ev.GroupReady(group="g000000", policy_version=0, rewards=(), excluded=0, placeholders=0, tokens_generated=0))
    assert h.last == [Wake(h.now + 5.0, "supply")]
    h.give(ev.TimerFired(service="scheduler", key="supply"), at=h.now + 5.0)
    assert h.names() == ["execution_moved", "execution_moved", "cell_role_ordered"]
    order = h.all(ev.CellRoleOrdered)[-1]
    assert (order.cell, order.order, order.role) == (0, 1, "training")
    assert {e.to_cell for e in h.all(ev.ExecutionMoved)} == {2}


def test_standalone_engines_hold_most_and_take_the_executions_of_cells_that_leave() -> None:
    plan = replace(SMALL, cells=2, standalone=2)
    h = Hand(plan)
    h.up(0, 1)
    for k in (2, 3):  # they have no trainer
        life = f"i{k}-1"
        h.lives[k] = 1
        h.give(ev.CellStarted(cell=k, incarnation=life))
        h.give(ev.CellEngineReady(cell=k, incarnation=life, url="", version=0, capacity=plan.capacity))
    assert [e.cell for e in h.all(ev.ExecutionPlaced)] == [3] * 4 + [2] * 4 + [1] * 2
    h.group_done(0).group_done(1)
    h.give(ev.TimerFired(service="scheduler", key="supply"), at=h.now + 10)
    assert h.names() == ["cell_role_ordered"]  # the core held none
    h.role(0, "draining").role(0, "training")
    assert h.names() == ["batch_opened", "execution_moved", "execution_moved", "cell_role_ordered"]
    assert [e.to_cell for e in h.all(ev.ExecutionMoved)] == [3, 3]
    h.joined(0, 1).role(1, "joining").joined(1, 1).role(1, "training")
    h.group_done(2).group_done(3).group_done(4)
    assert {e.cell for e in h.all(ev.CellRoleOrdered)} == {0, 1}  # nobody else ever leaves
    assert h.core.state.capacity == h.core.state.pool == 2 * plan.capacity


def test_supply_must_hold_without_a_break() -> None:
    h = Hand(SMALL).all_up()
    for group in range(5):
        h.group_done(group)
    assert h.all(ev.CellRoleOrdered)  # ready for longer than 5 s by now
    again = Hand(SMALL).all_up().group_done(0)
    again.give(ev.GroupAssigned(group="g000000", batch=9, policy_version=0, advantages={}, paths={}))  # supply gone
    again.give(ev.TimerFired(service="scheduler", key="supply"), at=again.now + 60)
    assert not again.all(ev.CellRoleOrdered)


def test_batch_is_reduced_over_the_cells_that_trained_and_then_the_next_opens() -> None:
    h = in_training()
    h.trained(1, "g000001-0")
    assert not h.all(ev.BatchReduceOrdered)
    h.trained(0, "g000000-0")
    (order,) = h.all(ev.BatchReduceOrdered)
    assert (order.cells, order.executions, order.attempt) == ((0, 1), 1, 1)
    h.committed(1)
    assert h.names() == ["batch_opened"]
    assert h.all(ev.BatchOpened)[-1].base_version == 1


def test_batch_without_any_micro_step_commits_on_the_core_alone() -> None:
    h = in_training()
    h.trained(1, "g000001-0").trained(0, "g000000-0").committed(1)
    h.assign(2, 2, micro_steps=0).assign(3, 2, micro_steps=0).seal(2, [2, 3], [], executions=0)
    assert len(h.all(ev.BatchReduceOrdered)) == 1  # the core has not joined yet
    h.joined(0, 2)
    order = h.all(ev.BatchReduceOrdered)[-1]
    assert (order.batch, order.cells, order.executions) == (2, (0,), 1)


def test_lost_satellites_micro_steps_are_trained_again_before_the_reduction() -> None:
    h = in_training()
    old = h.life(1)
    h.trained(1, "g000001-0").died(1).trained(0, "g000000-0")
    assert not h.all(ev.BatchReduceOrdered)
    h.trained(1, "g000001-0", life=old)  # told late by the process that is gone
    assert not h.all(ev.BatchReduceOrdered)
    h.trained(0, "g000001-0")
    assert h.all(ev.BatchReduceOrdered)[-1].cells == (0,)


def test_lost_satellite_follows_when_it_is_back() -> None:
    h = in_training().died(1).up(1)
    order = h.all(ev.CellRoleOrdered)[-1]
    assert (order.cell, order.role, order.order) == (1, "training", 2)


def test_lost_core_reopens_the_batch_when_it_is_back() -> None:
    h = in_training().trained(0, "g000000-0").trained(1, "g000001-0")
    assert len(h.all(ev.BatchReduceOrdered)) == 1
    h.died(0).up(0)
    assert h.names() == ["cell_role_ordered", "batch_opened"]
    assert h.all(ev.BatchOpened)[-1].attempt == 2
    h.trained(1, "g000001-0", attempt=1)  # of the attempt before
    h.joined(0, 1, 2).joined(1, 1, 2).trained(1, "g000000-0", attempt=2)
    assert len(h.all(ev.BatchReduceOrdered)) == 1
    h.trained(1, "g000001-0", attempt=2)
    assert h.all(ev.BatchReduceOrdered)[-1].cells == (0, 1)
    assert h.all(ev.BatchReduceOrdered)[-1].attempt == 2


def test_commit_that_overtakes_the_cores_death_counts() -> None:
    h = in_training().trained(0, "g000000-0").trained(1, "g000001-0").died(0).committed(1)
    assert h.core.state.version == 1
    h.up(0, version=1).role(0, "training")
    assert [(e.batch, e.attempt) for e in h.all(ev.BatchOpened)] == [(1, 1), (2, 1)]


def test_core_that_saved_a_step_but_did_not_tell_yet_is_waited_for() -> None:
    h = in_training().trained(0, "g000000-0").trained(1, "g000001-0").died(0).up(0, version=1)
    assert [e.attempt for e in h.all(ev.BatchOpened)] == [1]
    h.committed(1).role(0, "training")
    assert [(e.batch, e.attempt) for e in h.all(ev.BatchOpened)] == [(1, 1), (2, 1)]


def test_lost_work_is_supply_again() -> None:
    h = in_training()
    assert sorted(h.core.state.batch.untrained) == ["g000000", "g000001"]
    h.trained(1, "g000001-0")
    assert sorted(h.core.state.batch.untrained) == ["g000000"]
    h.died(1)
    assert sorted(h.core.state.batch.untrained) == ["g000000", "g000001"]


def test_reports_of_an_earlier_order_do_not_make_a_cell_serve() -> None:
    h = in_training().trained(0, "g000000-0").trained(1, "g000001-0").committed(1)
    h.assign(2, 2, 0).assign(3, 2, 0).seal(2, [2, 3], []).joined(0, 2).committed(2).refitted(1, 2)
    cell = h.core.state.cells[1]
    late = ev.CellRoleChanged(
        cell=1,
        incarnation=h.life(1),
        order=cell.order - 1,
        role="rollout",
        previous="draining",
        seconds=0,
        version=0,
    )
    assert not h.give(late).core.state.cells[1].serving
    assert h.role(1, "rollout", "returning").core.state.cells[1].serving


def test_next_batch_waits_for_refits_that_read_a_snapshot_about_to_go() -> None:
    plan = Plan(cells=2, capacity=40, mode="async", mu=2, phi=1.0, groups=2, executions=2, steps=8, evaluate=0)
    h = Hand(plan).all_up().role(0, "training")
    for batch in (1, 2, 3):
        numbers = [2 * batch - 2, 2 * batch - 1]
        h.joined(0, batch).group_done(numbers[0]).group_done(numbers[1])
        h.assign(numbers[0], batch, 0).assign(numbers[1], batch, 0).seal(batch, numbers, []).committed(batch)
    assert h.core.state.published == 2  # cell 1 still reads it; batch 4 would publish 4, which ends 2
    assert h.all(ev.BatchOpened)[-1].batch == 3
    h.refitted(1, 2)
    assert h.all(ev.BatchOpened)[-1].batch == 4


def test_member_lost_during_the_reduction_restarts_the_attempt() -> None:
    h = in_training().trained(0, "g000000-0").trained(1, "g000001-0").died(1)
    assert h.names() == ["batch_opened"]
    assert h.all(ev.BatchOpened)[-1].attempt == 2


def test_gradient_in_two_live_cells_restarts_the_attempt() -> None:
    h = in_training().trained(0, "g000000-0").trained(1, "g000000-0")
    assert h.names() == ["batch_opened"]


def test_core_that_lost_committed_steps_fails_the_run_with_the_fix() -> None:
    h = in_training().trained(0, "g000000-0").trained(1, "g000001-0").committed(1).died(0).up(0, version=0)
    failed = h.all(ev.RunPhaseChanged)[-1]
    assert failed.phase == "failed"
    assert "checkpoint_every" in failed.reason
    h.give(ev.RunResumed(resumed_at=0.0))
    assert h.all(ev.RunPhaseChanged)[-1].phase == "training"


def test_executions_of_a_lost_cell_move_or_wait_for_it() -> None:
    h = Hand(SMALL).all_up()
    h.finish("g000000x00")  # one place in cell 2
    held = set(h.core.state.cells[1].executions)
    h.died(1)
    moved = h.all(ev.ExecutionMoved)
    assert len(moved) == 3  # two places in cell 0, one in cell 2
    assert all(m.from_cell == 1 for m in moved)
    h.up(1)
    back = h.all(ev.ExecutionMoved)[3:]
    assert [m.to_cell for m in back] == [1]
    assert {m.execution for m in h.all(ev.ExecutionMoved)} == held
    assert len(h.all(ev.ExecutionPlaced)) == 10  # each had one work item only


def test_burst_end_orders_returns_and_refits_and_dispatches_the_missing_groups() -> None:
    h = in_training().trained(0, "g000000-0").trained(1, "g000001-0").committed(1)
    h.assign(2, 2, 0).assign(3, 2, 0).seal(2, [2, 3], []).joined(0, 2).committed(2)
    names = h.names()
    assert names[:4] == ["burst_ended", "cell_role_ordered", "cell_role_ordered", "refit_ordered"]
    assert names.count("execution_dispatched") == 3 * 2  # 8 in the run, 5 dispatched: 3 left, all within the depth
    assert "execution_placed" not in names  # no engine has the new weights yet
    h.refitted(2, 2)
    assert [e.cell for e in h.all(ev.ExecutionPlaced)][-2:] == [2, 2]  # two of its places are still taken
    h.refitted(0, 2)
    assert h.names() == []  # refitted, but not back in its role
    h.role(0, "rollout", "returning")
    assert set(h.names()) == {"execution_placed"}


def test_core_goes_right_on_if_the_next_batch_is_ready_and_the_others_can_hold_the_work() -> None:
    plan = Plan(cells=3, capacity=20, mu=1, phi=1.0, groups=2, executions=2, steps=4, supply_hold_s=0.0, evaluate=0)
    h = Hand(plan).all_up()
    for group in range(4):
        h.group_done(group)
    h.role(0, "training").joined(0, 1)
    h.assign(0, 1, 0).assign(1, 1, 0).seal(1, [0, 1], []).committed(1)
    assert h.names()[:4] == ["burst_ended", "cell_role_ordered", "refit_ordered", "execution_dispatched"]
    assert h.names()[-1] == "batch_opened"
    assert h.all(ev.CellRoleOrdered)[-1].cell == 1


def test_nothing_new_between_stop_and_resume() -> None:
    h = Hand(SMALL).all_up()
    placed = len(h.all(ev.ExecutionPlaced))
    h.give(ev.StopRequested(reason="ctrl-c"))
    for group in range(5):
        h.group_done(group)
        assert h.names() == []
    h.give(ev.RunResumed(resumed_at=0.0)).all_up()
    assert len(h.all(ev.ExecutionPlaced)) == placed
    assert h.all(ev.CellRoleOrdered)


def test_supervisors_failure_is_noted_and_resumed() -> None:
    h = Hand(SMALL).all_up()
    h.give(ev.RunPhaseChanged(phase="failed", reason="proxy died 6 times"))
    assert h.core.state.phase == "failed"
    h.give(ev.RunResumed(resumed_at=0.0))
    assert h.all(ev.RunPhaseChanged)[-1].phase == "training"


def test_hopeless_runs_fail_with_the_reason() -> None:
    no_tasks = SchedulerCore()
    started = ev.RunStarted(
        run="r",
        config=Hand(SMALL).core.state.started.config,
        run_dir="",
        train_tasks=(),
        eval_tasks={},
        started_at=0.0,
    )
    assert "tasks.train" in str(no_tasks.handle(started, 0.0))
    assert "async_training_cells" in Hand(Plan(mode="async", cells=2, async_cells=2)).all(ev.RunPhaseChanged)[-1].reason
    h = Hand(SMALL).all_up()
    h.give(ev.ServiceDied(service="cell-agent-0", exit_code=1, will_restart=False, log_tail=""))
    assert "cell-agent-0" in h.all(ev.RunPhaseChanged)[-1].reason


def test_evaluation_runs_before_and_after_on_the_same_tasks_and_seeds() -> None:
    plan = Plan(cells=1, capacity=8, groups=1, executions=1, mu=1, phi=0.0, steps=1, supply_hold_s=0.0, evaluate=7)
    h = Hand(plan).all_up()
    before = h.all(ev.ExecutionDispatched)
    assert sorted(sum(e.task == t for e in before) for t in {e.task for e in before}) == [2, 2, 3]
    h.finish(*(e.execution for e in before))
    h.group_done(0).role(0, "training").joined(0, 1).assign(0, 1, 0).seal(1, [0], []).committed(1)
    after = [e for e in h.all(ev.ExecutionDispatched) if e.eval_phase == "after"]
    assert [(e.task, e.seed, e.index) for e in after] == [(e.task, e.seed, e.index) for e in before]
    assert {e.policy_version for e in after} == {1}
    h.refitted(0, 1).role(0, "rollout").finish(*(e.execution for e in after))
    assert h.core.state.phase == "eval_after"  # not assessed yet
    for e in [*before, *after]:
        h.give(
            ev.ExecutionAssessed(
                execution=e.execution,
                group=e.group,
                attempt=1,
                artifact="",
                branch="",
                status="scored",
                score=1.0,
                tries=1,
                seconds=0,
            )
        )
    assert h.core.state.phase == "finished"


def test_no_state_before_the_run_started() -> None:
    core = SchedulerCore()
    assert core.handle(ev.StopRequested(reason=""), 0.0) == ()
    with pytest.raises(NotStarted):
        core.snapshot()
