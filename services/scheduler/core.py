"""The scheduler: who rolls out, who trains, what is dispatched when. Pure; docs/scheduler.md has the rules.

Invariants: an execution is dispatched once, is in one place at most, and leaves only by ExecutionFinished. No cell
leaves rollout by decision while the others' capacity is below the waterlevel. Batches commit in order, each exactly
once. At most steps * B groups are ever dispatched, so that the run ends with every group consumed.

`handle` notes what the event says, then `Actions.advance` does whatever the state now allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from services.scheduler import batches
from services.scheduler.actions import OVER, SUPPLY, Actions
from services.scheduler.handover import release
from services.scheduler.notes import Notes
from services.scheduler.policy import Policy, policy_for
from services.scheduler.state import OFFLINE, TRAINING, Batch, Cell, Settings, State, new_state
from shared import events as ev
from shared.actor import Effect
from shared.config import RunConfig, from_plain
from shared.events import Event
from shared.ids import agent_cell

SERVICE = "scheduler"


class NotStarted(RuntimeError):
    """The core was asked for its state before RunStarted."""


class SchedulerCore:
    """Pure core of the scheduler service; also driven by the simulator, which may give a policy of its own."""

    def __init__(self, make_policy: Callable[[Settings], Policy] = policy_for) -> None:
        self._make_policy = make_policy
        self._actions: Actions | None = None

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        if self._actions is None:
            if not isinstance(event, ev.RunStarted):
                return ()
            self._actions = actions = self._acting_on(new_state(event, Settings.of(_config(event))))
            if actions.policy.takes_notes:
                actions.state.notes = Notes()
            actions.enter("starting")
            _check_settings(actions)
        else:
            actions = self._actions
            handler = _HANDLERS.get(type(event))
            if handler is None:
                return ()
            actions.out = []
            if actions.state.notes is not None:
                actions.state.notes.now = now
            handler(actions, event)
        actions.advance(now)
        return actions.out

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self.state)

    def restore(self, data: bytes) -> None:
        """Take the state of a `snapshot`; the next events continue from there."""
        self._actions = self._acting_on(msgspec.msgpack.decode(data, type=State))

    @property
    def state(self) -> State:
        if self._actions is None:
            raise NotStarted("the scheduler has seen no RunStarted: the stream's first event must be one")
        return self._actions.state

    def _acting_on(self, state: State) -> Actions:
        config = _config(state.started)
        settings = Settings.of(config)
        return Actions(state, config, settings, self._make_policy(settings))


def _config(started: ev.RunStarted) -> RunConfig:
    return from_plain(started.config)


def _check_settings(a: Actions) -> None:
    settings = a.settings
    most = min(settings.cells, settings.cells + settings.standalone - 1)  # cells in training
    if settings.steps and not a.state.started.train_tasks:
        a.fail("no training task is left; fix the folder named by tasks.train")
    elif settings.mode == "async" and not 0 < settings.async_training_cells <= most:
        a.fail(
            f"scheduler.async_training_cells is {settings.async_training_cells}, but of {settings.cells} cells and "
            f"{settings.standalone} standalone engines at least one must train and one roll out (1 to {most})"
        )


# ---------------------------------------------------------------------------------------------------------- run, timers


def _run_resumed(a: Actions, event: ev.RunResumed) -> None:
    """All processes are new: the cells come back by CellStarted, executions wait for them."""
    a.state.stopped = False
    for cell in a.state.cells:
        cell.gone = False
        a.lose(cell)
        a.touch(cell)
    if a.state.phase == "failed":
        a.enter(a.state.failed_in, "resumed")


def _stop_requested(a: Actions, event: ev.StopRequested) -> None:
    a.state.stopped = True


def _phase_changed(a: Actions, event: ev.RunPhaseChanged) -> None:
    """Our own, except when the supervisor gives the run up."""
    s = a.state
    if event.phase == "failed" and event.reason != s.failure and s.phase not in OVER:
        s.failed_in, s.phase = s.phase, "failed"


def _service_died(a: Actions, event: ev.ServiceDied) -> None:
    number = agent_cell(event.service)
    if number is None or number >= len(a.state.cells):
        return
    cell = a.state.cells[number]
    a.lose(cell)
    if event.will_restart or a.state.stopped:
        return
    cell.gone = True
    a.touch(cell)
    if cell.index == 0:
        a.fail("the core cell is not started again; see the log of cell-agent-0, then resume the run")
    elif a.state.phase == "starting":
        a.fail(f"cell {cell.index} does not start; see the log of {event.service}, then resume the run")


def _timer_fired(a: Actions, event: ev.TimerFired) -> None:
    if event.service == SERVICE and event.key == SUPPLY:
        a.state.ask_at = None


# ---------------------------------------------------------------------------------------------------------------- cells


def _of(a: Actions, event: Any) -> Cell | None:
    """The cell of an agent's event, if the event is of the incarnation that owns it."""
    if event.cell >= len(a.state.cells):
        return None
    cell = a.state.cells[event.cell]
    return cell if cell.incarnation and cell.incarnation == event.incarnation else None


def _cell_started(a: Actions, event: ev.CellStarted) -> None:
    if event.cell >= len(a.state.cells) or a.state.cells[event.cell].incarnation == event.incarnation:
        return
    cell = a.state.cells[event.cell]
    a.lose(cell)
    cell.incarnation = event.incarnation
    cell.gone = False
    a.touch(cell)


def _cell_failed(a: Actions, event: ev.CellFailed) -> None:
    if cell := _of(a, event):
        a.lose(cell)


def _engine_ready(a: Actions, event: ev.CellEngineReady) -> None:
    if cell := _of(a, event):
        cell.engine_ready = True
        cell.engine_version = event.version
        cell.capacity = event.capacity
        a.touch(cell)
        if cell.engine_version < a.state.published:
            a.refit(cell)
        a.catch_up(cell)


def _trainer_ready(a: Actions, event: ev.CellTrainerReady) -> None:
    if not (cell := _of(a, event)):
        return
    cell.trainer_ready = True
    cell.trainer_version = event.version
    a.touch(cell)
    if cell.index == 0 and event.version < a.state.version:
        a.fail(
            f"the core came back at version {event.version}, but {a.state.version} batches are committed: the last "
            "checkpoint is missing (set training.checkpoint_every to 1)"
        )
    a.catch_up(cell)


def _role_changed(a: Actions, event: ev.CellRoleChanged) -> None:
    """Reports of an older order are of the past, unless the cell just came up (it may not know of orders yet)."""
    cell = _of(a, event)
    if cell and (event.order >= cell.order or not cell.ordered or event.previous == OFFLINE):
        cell.role = event.role
        a.touch(cell)
        if a.state.notes is not None:
            a.state.notes.role_changed(event.previous, event.role, event.seconds)


def _cell_refitted(a: Actions, event: ev.CellRefitted) -> None:
    if cell := _of(a, event):
        cell.engine_version = event.version
        cell.reading = cell.refit_to if event.version < cell.refit_to else -1
        a.touch(cell)


def _cell_joined(a: Actions, event: ev.CellJoinedBatch) -> None:
    cell = _of(a, event)
    if cell and cell.desired == TRAINING:
        cell.joined = (event.batch, event.attempt)


# ----------------------------------------------------------------------------------------------------------- executions


def _execution_started(a: Actions, event: ev.ExecutionStarted) -> None:
    execution = a.state.executions.get(event.execution)
    if execution and not execution.started:
        execution.started = True
        a.state.begun += 1
        if a.state.notes is not None:
            execution.started_at = a.state.notes.now


def _execution_finished(a: Actions, event: ev.ExecutionFinished) -> None:
    """However it ended (completed, timed out, never begun): it no longer counts into the waterlevel."""
    s = a.state
    execution = s.executions.get(event.execution)
    if execution is None:
        return
    release(s, a.room, event.execution)
    del s.executions[event.execution]
    s.finished += 1
    if execution.evaluation:
        s.eval_running -= 1
    elif s.notes is not None and execution.started:
        s.notes.execution_finished(execution.group, s.notes.now - execution.started_at)


def _execution_assessed(a: Actions, event: ev.ExecutionAssessed) -> None:
    a.state.eval_unassessed.pop(event.execution, None)


# -------------------------------------------------------------------------------------------------------------- batches


def _open_batch(a: Actions, number: int) -> Batch | None:
    batch = a.state.batch
    return batch if batch is not None and batch.number == number else None


def _group_ready(a: Actions, event: ev.GroupReady) -> None:
    a.state.ready[event.group] = True
    if a.state.notes is not None:
        a.state.notes.group_ready(event.group)


def _group_assigned(a: Actions, event: ev.GroupAssigned) -> None:
    a.state.ready.pop(event.group, None)
    if batch := _open_batch(a, event.batch):
        batches.assign(batch, event)


def _micro_step_ready(a: Actions, event: ev.MicroStepReady) -> None:
    if batch := _open_batch(a, event.batch):
        batches.add_work(batch, event)


def _micro_step_trained(a: Actions, event: ev.MicroStepTrained) -> None:
    batch = _open_batch(a, event.batch)
    if batch and event.attempt == batch.attempt and _of(a, event):
        batches.train(batch, event)
        if a.state.notes is not None:
            a.state.notes.trained_s += event.seconds


def _batch_sealed(a: Actions, event: ev.BatchSealed) -> None:
    batch = _open_batch(a, event.batch)
    if batch and not batch.sealed:
        batches.seal(batch, event)


def _batch_committed(a: Actions, event: ev.BatchCommitted) -> None:
    """Also of an attempt that was given up meanwhile: the optimizer did step, the checkpoint is there."""
    s = a.state
    if not (batch := _open_batch(a, event.batch)):
        return
    s.groups_consumed += batch.groups
    s.version = event.version
    s.burst_batches += 1
    if s.notes is not None:
        s.notes.batch_committed(s.outstanding, event.seconds)
    s.batch = None
    if s.cells[0].trainer_ready:
        s.cells[0].trainer_version = event.version


_HANDLERS: dict[type[Event], Callable[[Actions, Any], None]] = {
    ev.RunResumed: _run_resumed,
    ev.StopRequested: _stop_requested,
    ev.RunPhaseChanged: _phase_changed,
    ev.ServiceDied: _service_died,
    ev.TimerFired: _timer_fired,
    ev.CellStarted: _cell_started,
    ev.CellFailed: _cell_failed,
    ev.CellEngineReady: _engine_ready,
    ev.CellTrainerReady: _trainer_ready,
    ev.CellRoleChanged: _role_changed,
    ev.CellRefitted: _cell_refitted,
    ev.CellJoinedBatch: _cell_joined,
    ev.ExecutionStarted: _execution_started,
    ev.ExecutionFinished: _execution_finished,
    ev.ExecutionAssessed: _execution_assessed,
    ev.GroupReady: _group_ready,
    ev.GroupAssigned: _group_assigned,
    ev.MicroStepReady: _micro_step_ready,
    ev.MicroStepTrained: _micro_step_trained,
    ev.BatchSealed: _batch_sealed,
    ev.BatchCommitted: _batch_committed,
}
