"""The scheduler's promises, checked event by event from the stream alone (no look into the core)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shared import events as ev
from shared.actor import Effect, Publish

if TYPE_CHECKING:
    from tests.scheduler.world import Plan

FINISHING = (ev.BatchReduceOrdered, ev.RunPhaseChanged, ev.RefitOrdered)  # of what was begun before a stop
OWN = (
    ev.RunPhaseChanged,
    ev.ExecutionDispatched,
    ev.ExecutionPlaced,
    ev.ExecutionMoved,
    ev.CellRoleOrdered,
    ev.RefitOrdered,
    ev.BatchOpened,
    ev.BatchReduceOrdered,
    ev.BurstEnded,
)
ONE_BY_ONE = ("elastic", "lookahead")
PHASES = ["starting", "eval_before", "training", "eval_after", "finished"]


class Checks:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.phases: list[str] = []
        self.stopped = False
        self.dispatched: dict[str, ev.ExecutionDispatched] = {}
        self.cell_of: dict[str, int] = {}
        self.placed: set[str] = set()
        self.finished: set[str] = set()
        self.reserved: dict[int, set[str]] = defaultdict(set)
        self.rollout: set[int] = set()  # cells whose engine may be used, as the stream says
        self.ordered_out: set[int] = set()
        self.arrived: set[int] = set()
        self.trainer_ready: set[int] = set()
        self.engine_up: set[int] = set()
        self.told: set[int] = set()  # cells whose incarnation was given an order
        self.engine_version: dict[int, int] = {}
        self.incarnation: dict[int, str] = {}
        self.groups: set[str] = set()
        self.groups_ready = 0
        self.consumed: list[str] = []
        self.sealed: dict[int, ev.BatchSealed] = {}
        self.opened: dict[int, int] = {}
        self.commits: list[int] = []
        self.bursts: list[ev.BurstEnded] = []
        self.staleness: list[float] = []
        self.joins: list[int] = []
        self.dispatch_boundaries: list[int] = []

    def see(self, event: Any) -> None:
        """An event of another service reaches the scheduler."""
        if not isinstance(event, OWN):
            self._check(event)

    def decided(self, effects: Sequence[Effect]) -> None:
        """What the scheduler made of it: checked against what it could know, not against what happens next."""
        if self.stopped:  # nothing new is begun
            assert all(isinstance(e, Publish) and isinstance(e.event, FINISHING) for e in effects), effects
        for effect in effects:
            if isinstance(effect, Publish):
                assert isinstance(effect.event, OWN)
                self._check(effect.event)

    def _check(self, event: Any) -> None:
        check = getattr(self, "_" + ev.NAME_OF[type(event)], None)
        if check:
            check(event)

    # -------------------------------------------------------------------------------------------- run and cells

    def _run_phase_changed(self, event: ev.RunPhaseChanged) -> None:
        self.phases.append(event.phase)

    def _stop_requested(self, event: ev.StopRequested) -> None:
        self.stopped = True

    def _run_resumed(self, event: ev.RunResumed) -> None:
        self.stopped = False
        for cell in range(self.plan.engines):
            self._lost(cell)

    def _lost(self, cell: int) -> None:
        self.rollout.discard(cell)
        self.reserved[cell].clear()
        self.arrived.discard(cell)
        self.trainer_ready.discard(cell)
        self.told.discard(cell)
        self.engine_up.discard(cell)
        self.incarnation[cell] = ""

    def _service_died(self, event: ev.ServiceDied) -> None:
        self._lost(int(event.service.rsplit("-", 1)[1]))

    def _cell_failed(self, event: ev.CellFailed) -> None:
        self._lost(event.cell)

    def _cell_started(self, event: ev.CellStarted) -> None:
        self._lost(event.cell)
        self.incarnation[event.cell] = event.incarnation

    def _cell_engine_ready(self, event: ev.CellEngineReady) -> None:
        self.engine_version[event.cell] = event.version
        self.engine_up.add(event.cell)
        if event.cell not in self.ordered_out:
            self.rollout.add(event.cell)

    def _cell_trainer_ready(self, event: ev.CellTrainerReady) -> None:
        if event.incarnation == self.incarnation[event.cell]:
            self.trainer_ready.add(event.cell)

    def _cell_refitted(self, event: ev.CellRefitted) -> None:
        if event.incarnation == self.incarnation[event.cell]:
            self.engine_version[event.cell] = event.version

    def _cell_role_changed(self, event: ev.CellRoleChanged) -> None:
        if event.incarnation != self.incarnation[event.cell]:
            return
        if event.role == "rollout" and event.cell not in self.ordered_out:
            self.rollout.add(event.cell)
        if event.role == "training" and event.cell in self.ordered_out:
            self.arrived.add(event.cell)

    def _cell_joined_batch(self, event: ev.CellJoinedBatch) -> None:
        if event.incarnation == self.incarnation[event.cell] and event.cell in self.ordered_out:
            self.arrived.add(event.cell)

    def _cell_role_ordered(self, event: ev.CellRoleOrdered) -> None:
        cell = event.cell
        assert cell < self.plan.cells, "a standalone engine never trains, so it has nothing to be ordered"
        self.told.add(cell)
        if event.role == "rollout":
            self.ordered_out.discard(cell)
            self.arrived.discard(cell)
            return
        if cell not in self.ordered_out:
            late = event.reason.startswith("ready for")  # it was meant to train, but could not take an order
            missing = set(range(cell)) - self.ordered_out
            assert not missing & self.trainer_ready & self.engine_up, "the training set is a prefix of the cell list"
            assert late or all(k < cell for k in self.ordered_out)
            self.joins.append(cell)
            level = len(self.dispatched) - len(self.finished)
            if self.plan.mode == "colocate" and not late and not self.ordered_out:
                pool = [k for k in self.rollout if k >= self.plan.cells]
                assert level <= len(pool) * self.plan.capacity
            if self.plan.mode in ONE_BY_ONE:
                assert not missing or late
                others = self.rollout - {cell}
                assert level <= len(others) * self.plan.capacity
                if cell > 0 and self.incarnation[cell - 1]:
                    assert cell - 1 in self.arrived, "one at a time"
        assert not self.reserved[cell], "executions were moved before the order"
        self.ordered_out.add(cell)
        self.rollout.discard(cell)

    def _burst_ended(self, event: ev.BurstEnded) -> None:
        self.bursts.append(event)
        # an incarnation that was to train, but was never told so, comes up in rollout without an order
        for cell in self.ordered_out - self.told:
            self.ordered_out.discard(cell)
            if cell in self.engine_up:
                self.rollout.add(cell)

    # ----------------------------------------------------------------------------------------------- executions

    def _execution_dispatched(self, event: ev.ExecutionDispatched) -> None:
        assert event.execution not in self.dispatched
        self.dispatched[event.execution] = event
        if event.purpose == "train" and event.group not in self.groups:
            self.groups.add(event.group)
            outstanding = len(self.groups) - len(self.consumed)
            if self.plan.mode != "lookahead":  # it plans mu and depth anew for every burst
                assert outstanding <= int((self.plan.mu + self.plan.phi) * self.plan.groups + 0.5)
            assert len(self.groups) <= self.plan.steps * self.plan.groups

    def _execution_placed(self, event: ev.ExecutionPlaced) -> None:
        assert event.execution not in self.placed, "one harness per execution"
        self.placed.add(event.execution)
        self._reserve(event.execution, event.cell)

    def _execution_moved(self, event: ev.ExecutionMoved) -> None:
        assert event.execution in self.placed
        assert self.cell_of[event.execution] == event.from_cell
        if event.to_cell < self.plan.cells and self.plan.mode in ONE_BY_ONE:
            assert not self._standalone_with_room(), "standalone engines are the first destinations"
        self.reserved[event.from_cell].discard(event.execution)
        self._reserve(event.execution, event.to_cell)

    def _standalone_with_room(self) -> list[int]:
        published = self.bursts[-1].version if self.bursts else 0
        engines = range(self.plan.cells, self.plan.engines)
        fresh = [k for k in engines if k in self.rollout and self.engine_version[k] >= published]
        return [k for k in fresh if len(self.reserved[k]) < self.plan.capacity]

    def _reserve(self, execution: str, cell: int) -> None:
        assert execution in self.dispatched
        assert execution not in self.finished
        assert cell in self.rollout
        self.cell_of[execution] = cell
        held = [c for c, executions in self.reserved.items() if execution in executions]
        assert not held, "in two places at once"
        self.reserved[cell].add(execution)
        assert len(self.reserved[cell]) <= self.plan.capacity
        assert self.engine_version[cell] >= self.dispatched[execution].policy_version

    def _execution_finished(self, event: ev.ExecutionFinished) -> None:
        assert event.execution not in self.finished
        self.finished.add(event.execution)
        self.reserved[self.cell_of[event.execution]].discard(event.execution)

    # --------------------------------------------------------------------------------------------------- batches

    def _group_ready(self, event: ev.GroupReady) -> None:
        self.groups_ready += 1

    def _batch_opened(self, event: ev.BatchOpened) -> None:
        assert event.batch == len(self.commits) + 1 or event.attempt > 1
        assert event.base_version == event.batch - 1
        assert event.attempt == self.opened.get(event.batch, 0) + 1
        self.opened[event.batch] = event.attempt
        if not self.plan.streaming:
            assert self.groups_ready >= event.batch * self.plan.groups, "opened before it was complete"

    def _batch_sealed(self, event: ev.BatchSealed) -> None:
        self.sealed[event.batch] = event
        self.staleness.append(event.mean_staleness)

    def _batch_committed(self, event: ev.BatchCommitted) -> None:
        self.commits.append(event.version)
        assert self.commits == list(range(1, len(self.commits) + 1))
        sealed = self.sealed[event.batch]
        assert set(event.micro_steps) == set(sealed.micro_steps)
        self.consumed.extend(sealed.groups)

    # ------------------------------------------------------------------------------------------------- at the end

    def finish(self) -> None:
        """What must be true of a run that is over."""
        assert [p for i, p in enumerate(self.phases) if p not in self.phases[:i]] == PHASES
        assert set(self.dispatched) == self.finished == self.placed
        assert len(self.commits) == self.plan.steps
        assert sorted(self.consumed) == sorted(self.groups)
        assert len(self.consumed) == self.plan.steps * self.plan.groups
