"""The cell agent's actor: from orders and facts on the stream to role changes and commands. Pure.

Invariants: the role changes by the table of roles.py only. A claim is asked for only after the cell joined that very
attempt of the batch, a reduction only with incarnations that are alive, and an acknowledgement only after
BatchCommitted. A rollout order never takes gradients out of a batch that counts on them: it waits for the commit.
Weights are read only from the core incarnation that is alive, whose snapshots alone exist. Calls that move: moves.py.

`handle` notes what the event says, then `_advance` issues what the state now allows and has not been issued yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from services.cell_agent import commands as do
from services.cell_agent.moves import Moves, arrives
from services.cell_agent.roles import Role, Trigger, advance, allows
from shared import events as ev
from shared.actor import Do, Effect, Publish
from shared.events import Event
from shared.ids import agent_cell

CORE = 0
EXPORT_PHASES = ("eval_after", "finished")
SNAPSHOTS = 2  # valid until the version after the next is published


class NeverTrains(RuntimeError):
    """A standalone engine was ordered to train: agent and scheduler read different run files."""


class State(msgspec.Struct):
    """What one agent knows. "Ours": of this cell's live incarnation."""

    cell: int
    trains: bool = True  # False: a standalone engine, without a trainer
    incarnation: str = ""  # "" = none alive
    role: Role = Role.OFFLINE
    since: float = 0.0
    order: int = 0
    version: int = 0  # that the last order named
    deferred: ev.CellRoleOrdered | None = None  # rollout order that waits for the commit
    trainer_ready: bool = False
    engine_version: int = -1
    refit: int = -1  # version that the engine is asked to load
    refit_issued: int = -1
    admit: bool = False  # Admit is to be issued
    admit_issued: int = -1  # version that it asked for

    live: dict[int, str] = {}  # incarnations of all cells
    store: str = ""
    offers: dict[int, str] = {}  # where live cells tell which snapshots they hold
    weights: dict[int, ev.WeightsPublished] = {}  # of the live core
    committed: int = 0
    checkpoint: str = ""
    phase: str = ""
    exported: int = -1
    export_issued: int = -1

    batch: ev.BatchOpened | None = None
    seal: ev.BatchSealed | None = None
    join_issued: bool = False
    left: tuple[int, int] = (0, 0)  # attempt that we left: what we did for it is void, so it is not joined again
    joined: bool = False  # ours
    trained: dict[str, int] = {}  # micro-step -> cell, of live incarnations in the open attempt
    reducing: tuple[int, ...] = ()
    reduce_open: bool = False  # a reduction was ordered and its batch is not committed
    epoch: int = 0  # reductions given up: a group in which one was may still hold a member's old sum

    moves: Moves = msgspec.field(default_factory=Moves)


class CellCore:
    """Pure core of one cell's agent, made once per process; `trains` is false for a standalone engine."""

    def __init__(self, cell: int, trains: bool = True) -> None:
        self.state = State(cell=cell, trains=trains)
        self._out: list[Effect] = []

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        self._out = []
        handler = HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event, now)
            self._advance()
        return self._out

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self.state)

    def restore(self, data: bytes) -> None:
        self.state = msgspec.msgpack.decode(data, type=State)

    def sources(self) -> tuple[str, ...]:
        """Where live cells other than this one and the core tell which snapshots they hold."""
        return tuple(at for cell, at in sorted(self.state.offers.items()) if cell not in (CORE, self.state.cell))

    def trained_elsewhere(self, micro_step: str) -> bool:
        """Whether a live incarnation of another cell has the micro-step's gradient in the open attempt."""
        return self.state.trained.get(micro_step, self.state.cell) != self.state.cell

    # ------------------------------------------------------------------------------------------------- plumbing

    def _do(self, command: Callable[..., do.Command], **fields: Any) -> None:
        if self.state.incarnation:
            self._out.append(Do(command(incarnation=self.state.incarnation, **fields)))

    def _step(self, trigger: Trigger, now: float) -> None:
        s = self.state
        previous, s.role = s.role, advance(s.role, trigger)
        if s.role is Role.ROLLOUT:
            s.moves.routes.clear()
        self._tell_role(previous, now)

    def _tell_role(self, previous: Role, now: float) -> None:
        s = self.state
        seconds = now - s.since if s.since else 0.0
        s.since = now
        self._out.append(
            Publish(
                ev.CellRoleChanged(
                    cell=s.cell,
                    incarnation=s.incarnation,
                    order=s.order,
                    role=str(s.role),
                    previous=str(previous),
                    seconds=seconds,
                    version=s.engine_version if s.role is Role.ROLLOUT else s.version,
                )
            )
        )

    def _ours(self, event: Any) -> bool:
        s = self.state
        return bool(s.incarnation) and event.cell == s.cell and event.incarnation == s.incarnation

    # -------------------------------------------------------------------------------------- incarnations, phases

    def _cell_started(self, event: ev.CellStarted, now: float) -> None:
        s = self.state
        if s.live.get(event.cell) == event.incarnation:
            return
        self._lose(event.cell)
        s.live[event.cell] = event.incarnation
        if event.cell == s.cell:
            s.incarnation, s.since, s.admit = event.incarnation, now, True
            self._do(do.BringUp, version=s.committed, checkpoint=s.checkpoint)

    def _cell_failed(self, event: ev.CellFailed, now: float) -> None:
        if self.state.live.get(event.cell) == event.incarnation:
            self._lose(event.cell)

    def _service_died(self, event: ev.ServiceDied, now: float) -> None:
        """The supervisor sees the end of an agent long before its next incarnation can tell of it."""
        cell = agent_cell(event.service)
        if cell is not None and cell in self.state.live:
            self._lose(cell)

    def _lose(self, cell: int) -> None:
        """Whatever ran in `cell` is gone; its snapshots and gradients with it."""
        s = self.state
        s.live.pop(cell, None)
        s.offers.pop(cell, None)
        s.trained = {m: c for m, c in s.trained.items() if c != cell}
        if cell == CORE:
            s.weights, s.store = {}, ""  # they lived in its trainer
        if cell == s.cell:
            self._out.extend(s.moves.lost(cell, s.incarnation))
            s.incarnation, s.role, s.deferred, s.left = "", Role.OFFLINE, None, (0, 0)
            s.trainer_ready, s.admit, s.joined, s.join_issued = False, False, False, False
            s.engine_version = s.refit = s.refit_issued = s.admit_issued = s.export_issued = -1
        elif cell in s.reducing and s.cell in s.reducing:
            assert s.batch is not None
            self._do(do.LostMember, cell=cell, batch=s.batch.batch, attempt=s.batch.attempt)
        elif cell == CORE and s.batch is not None:
            self._leave_batch()
        if cell == CORE:
            s.batch = None  # void, until it is opened again
            s.reducing = ()
            self._ask_again()

    def _leave_batch(self) -> None:
        s = self.state
        if s.batch is not None and (s.joined or s.join_issued):
            s.left = (s.batch.batch, s.batch.attempt)
            self._do(do.Abandon, batch=s.batch.batch, attempt=s.batch.attempt)
        s.joined = s.join_issued = False

    def _trainer_ready(self, event: ev.CellTrainerReady, now: float) -> None:
        s = self.state
        if event.cell == CORE and s.live.get(CORE) == event.incarnation:
            s.store = event.store
        if self._ours(event):
            s.trainer_ready = True
            self._maybe_ready(now)

    def _engine_ready(self, event: ev.CellEngineReady, now: float) -> None:
        s = self.state
        if event.offers and s.live.get(event.cell) == event.incarnation:
            s.offers[event.cell] = event.offers
        if self._ours(event):
            s.engine_version = event.version
            self._maybe_ready(now)
            self._maybe_refitted(now)

    def _maybe_ready(self, now: float) -> None:
        s = self.state
        if s.role is Role.OFFLINE and (s.trainer_ready or not s.trains) and s.engine_version >= 0:
            self._step(Trigger.READY, now)

    def _phase_changed(self, event: ev.RunPhaseChanged, now: float) -> None:
        self.state.phase = event.phase
        if self.state.engine_version >= 0:
            self._do(do.Count)

    def _policy_exported(self, event: ev.PolicyExported, now: float) -> None:
        self.state.exported = event.version

    # ----------------------------------------------------------------------------------------------------- roles

    def _role_ordered(self, event: ev.CellRoleOrdered, now: float) -> None:
        s = self.state
        if event.cell != s.cell or event.order <= s.order:
            return
        s.order = event.order
        if not s.incarnation:
            return  # lost: the next incarnation gets an order of its own
        if event.role == "rollout":
            counted = s.joined and (s.reducing or s.cell in s.trained.values())
            s.deferred = event if counted else None
            if not counted:
                self._return(event, now)
        else:
            s.deferred = None
            self._train(event, now)

    def _train(self, event: ev.CellRoleOrdered, now: float) -> None:
        s = self.state
        if not s.trains:
            raise NeverTrains(f"cell {s.cell} is a standalone engine; the scheduler must not order it to train")
        s.version = event.version
        if not allows(s.role, Trigger.ORDER_TRAINING):
            self._tell_role(s.role, now)  # on its way already: the newer order is obeyed as well
            return
        self._step(Trigger.ORDER_TRAINING, now)
        if s.role is Role.DRAINING:
            self._do(do.Drain, order=s.order)
        else:
            self._core_is_joined(now)

    def _core_is_joined(self, now: float) -> None:
        """The core holds the weights already; it trains whenever a batch opens."""
        if self.state.cell == CORE and self.state.role is Role.JOINING:
            self._step(Trigger.JOINED, now)

    def _drained(self, event: ev.CellDrained, now: float) -> None:
        s = self.state
        if self._ours(event) and event.order == s.order and s.role is Role.DRAINING:
            self._step(Trigger.DRAINED, now)
            self._core_is_joined(now)

    def _return(self, event: ev.CellRoleOrdered, now: float) -> None:
        s = self.state
        s.version = event.version
        if s.role is Role.DRAINING:
            self._do(do.CancelDrain)
        self._leave_batch()
        if s.role is not Role.RETURNING:
            self._step(Trigger.ORDER_ROLLOUT, now)
        s.refit = max(s.refit, event.version)
        self._maybe_refitted(now)

    def _refit_ordered(self, event: ev.RefitOrdered, now: float) -> None:
        s = self.state
        if event.cell == s.cell and s.incarnation:
            s.refit = max(s.refit, event.version)

    def _refitted(self, event: ev.CellRefitted, now: float) -> None:
        s = self.state
        if self._ours(event):
            s.engine_version = event.version
            if event.version >= s.refit_issued:
                s.refit_issued = -1
            self._maybe_refitted(now)

    def _maybe_refitted(self, now: float) -> None:
        s = self.state
        if s.role is Role.RETURNING and s.engine_version >= s.version:
            self._step(Trigger.REFITTED, now)

    # --------------------------------------------------------------------------------------------- calls that move

    def destination(self, execution: str) -> int:
        """The cell to which an execution of ours was moved; -1 if it was not."""
        return self.state.moves.routes.get(execution, -1)

    def _execution_moved(self, event: ev.ExecutionMoved, now: float) -> None:
        self.state.moves.moved(self.state.cell, event)

    def _call_cut(self, event: ev.CallCut, now: float) -> None:
        s = self.state
        if not s.incarnation:
            return
        if event.from_cell == s.cell and event.incarnation == s.incarnation:
            self._out.extend(s.moves.cut(event, now))
        elif event.to_cell == s.cell:
            source_lives = s.live.get(event.from_cell) == event.incarnation
            self._out.append(arrives(event, s.cell, s.incarnation, s.role, source_lives))

    def _call_adopted(self, event: ev.CallAdopted, now: float) -> None:
        self._out.extend(self.state.moves.adopted(event, self.state.incarnation))

    def _call_released(self, event: ev.CallReleased, now: float) -> None:
        if event.cell == self.state.cell:
            self.state.moves.released(event)

    def _timer_fired(self, event: ev.TimerFired, now: float) -> None:
        self._out.extend(self.state.moves.timer(event.key, self.state.incarnation))

    # --------------------------------------------------------------------------------------------------- batches

    def _batch_opened(self, event: ev.BatchOpened, now: float) -> None:
        s = self.state
        if event.batch <= s.committed:
            return
        self._leave_batch()
        s.batch, s.trained, s.reducing = event, {}, ()
        if s.seal is not None and s.seal.batch != event.batch:
            s.seal = None

    def _open_is(self, batch: int, attempt: int) -> bool:
        b = self.state.batch
        return b is not None and (b.batch, b.attempt) == (batch, attempt)

    def _joined_batch(self, event: ev.CellJoinedBatch, now: float) -> None:
        s = self.state
        if not self._ours(event) or not self._open_is(event.batch, event.attempt) or not s.join_issued:
            return
        s.joined = True
        if s.role is Role.JOINING:
            self._step(Trigger.JOINED, now)
        sealed = s.seal is not None and s.seal.batch == event.batch
        self._do(do.Claim, batch=event.batch, attempt=event.attempt, sealed=sealed)

    def _micro_step_trained(self, event: ev.MicroStepTrained, now: float) -> None:
        s = self.state
        if self._open_is(event.batch, event.attempt) and s.live.get(event.cell) == event.incarnation:
            s.trained.setdefault(event.micro_step, event.cell)

    def _batch_sealed(self, event: ev.BatchSealed, now: float) -> None:
        s = self.state
        if event.batch <= s.committed:
            return
        s.seal = event
        if s.joined and s.batch is not None and s.batch.batch == event.batch:
            self._do(do.Seal)

    def _reduce_ordered(self, event: ev.BatchReduceOrdered, now: float) -> None:
        s = self.state
        s.epoch += s.reduce_open
        s.reduce_open = True
        if not self._open_is(event.batch, event.attempt):
            return
        s.reducing = event.cells
        if s.cell not in event.cells or not s.incarnation:
            return
        if reason := self._unfit_to_reduce(event):
            self._do(do.Restart, reason=reason)
            return
        fields: dict[str, Any] = {
            "batch": event.batch,
            "attempt": event.attempt,
            "group": "_".join([f"e{s.epoch}", *(f"{c}-{s.live[c]}" for c in event.cells)]),
            "rank": event.cells.index(s.cell),
            "cells": event.cells,
            "store": s.store,
            "ours": tuple(sorted(m for m, c in s.trained.items() if c == s.cell)),
        }
        if s.cell != CORE:
            self._do(do.Reduce, **fields)
            return
        assert s.batch is not None
        assert s.seal is not None
        version, steps = s.batch.base_version + 1, s.seal.micro_steps
        self._do(do.Commit, **fields, executions=event.executions, version=version, micro_steps=steps)

    def _unfit_to_reduce(self, event: ev.BatchReduceOrdered) -> str:
        """Why the reduction would not hold each micro-step once; "" if it would."""
        s = self.state
        lost = [c for c in event.cells if c not in s.live]
        if lost or not s.joined:
            return f"cells {lost or s.cell} of the reduction of batch {event.batch} hold no gradients of it"
        if s.cell != CORE:
            return ""
        if s.seal is None or s.seal.batch != event.batch:
            return f"batch {event.batch} is not sealed"
        wrong = [m for m in s.seal.micro_steps if s.trained.get(m, -1) not in event.cells]
        wrong += sorted(set(s.trained) - set(s.seal.micro_steps))
        if wrong:
            return f"micro-steps {wrong} of batch {event.batch} are not trained exactly once in {event.cells}"
        return ""

    def _batch_committed(self, event: ev.BatchCommitted, now: float) -> None:
        s = self.state
        if event.version <= s.committed:
            return
        s.committed, s.checkpoint, s.reduce_open = event.version, event.checkpoint, False
        self._do(do.Settle, batch=event.batch, micro_steps=event.micro_steps)
        s.batch, s.seal, s.trained, s.reducing = None, None, {}, ()
        s.joined = s.join_issued = False
        if s.deferred is not None:
            order, s.deferred = s.deferred, None
            self._return(order, now)

    def _weights_published(self, event: ev.WeightsPublished, now: float) -> None:
        s = self.state
        if s.live.get(event.cell) == event.incarnation:
            s.weights[event.version] = event
            s.weights = dict(sorted(s.weights.items())[-SNAPSHOTS:])
            self._ask_again()

    def _ask_again(self) -> None:
        """What the engine was to load cannot be pulled any more if it is lost with the core, or overtaken."""
        s = self.state
        if s.engine_version < 0 < s.admit_issued and s.admit_issued not in s.weights:
            s.admit = True
        if s.refit_issued not in s.weights:
            s.refit_issued = -1

    # --------------------------------------------------------------------------------- what the state now allows

    def _advance(self) -> None:
        s = self.state
        if not s.incarnation:
            return
        self._advance_engine()
        self._advance_join()
        over = s.cell == CORE and s.phase in EXPORT_PHASES and s.batch is None
        if over and s.trainer_ready and s.committed not in (s.exported, s.export_issued):
            s.export_issued = s.committed
            self._do(do.Export, version=s.committed)

    def _advance_engine(self) -> None:
        """Bring the engine up, then keep it at the version that is asked for, one refit at a time."""
        s = self.state
        if s.admit and (s.committed == 0 or s.committed in s.weights):
            s.admit, s.admit_issued = False, s.committed
            self._do(do.Admit, weights=s.weights.get(s.committed) if s.committed else None)
        if s.engine_version >= 0 and s.refit > s.engine_version and s.refit_issued < 0:
            fit = [v for v in s.weights if s.refit <= v <= s.committed]
            if fit:
                s.refit_issued = fit[0]
                self._do(do.Refit, weights=s.weights[fit[0]])

    def _advance_join(self) -> None:
        s = self.state
        if s.batch is None or s.join_issued or s.role not in (Role.JOINING, Role.TRAINING) or not s.trainer_ready:
            return
        if (s.batch.batch, s.batch.attempt) == s.left:
            return
        base = s.batch.base_version
        if s.cell == CORE or base in s.weights:
            s.join_issued = True
            weights = None if s.cell == CORE else s.weights[base]
            self._do(do.Join, batch=s.batch.batch, attempt=s.batch.attempt, version=base, weights=weights)


HANDLERS: dict[type[Event], Callable[[CellCore, Any, float], None]] = {
    ev.CellStarted: CellCore._cell_started,
    ev.CellFailed: CellCore._cell_failed,
    ev.ServiceDied: CellCore._service_died,
    ev.CellTrainerReady: CellCore._trainer_ready,
    ev.CellEngineReady: CellCore._engine_ready,
    ev.RunPhaseChanged: CellCore._phase_changed,
    ev.PolicyExported: CellCore._policy_exported,
    ev.CellRoleOrdered: CellCore._role_ordered,
    ev.CellDrained: CellCore._drained,
    ev.ExecutionMoved: CellCore._execution_moved,
    ev.CallCut: CellCore._call_cut,
    ev.CallAdopted: CellCore._call_adopted,
    ev.CallReleased: CellCore._call_released,
    ev.TimerFired: CellCore._timer_fired,
    ev.RefitOrdered: CellCore._refit_ordered,
    ev.CellRefitted: CellCore._refitted,
    ev.BatchOpened: CellCore._batch_opened,
    ev.CellJoinedBatch: CellCore._joined_batch,
    ev.MicroStepTrained: CellCore._micro_step_trained,
    ev.BatchSealed: CellCore._batch_sealed,
    ev.BatchReduceOrdered: CellCore._reduce_ordered,
    ev.BatchCommitted: CellCore._batch_committed,
    ev.WeightsPublished: CellCore._weights_published,
}
