"""What the proxy knows from the stream: keys, where each execution's calls go, and every execution's recorded contexts.

Invariant: a pure function of the events, in order. One key identifies one attempt of one execution, from
ExecutionStarted to ExecutionFinished (or a later attempt); only its hash is known here. Trees are kept until the
execution is assessed. A record that is durable may be told ahead of the stream (`learn`): its echo changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from services.proxy.context import Contexts
from services.proxy.flights import Flights
from services.proxy.handover import Cuts
from shared.actor import Do, Effect
from shared.events import (
    CellEngineReady,
    CellFailed,
    CellRefitted,
    CellRoleChanged,
    CellStarted,
    Event,
    ExecutionAssessed,
    ExecutionFinished,
    ExecutionMoved,
    ExecutionPlaced,
    ExecutionStarted,
    ModelCallMarked,
    ModelCallRecorded,
    ProxyReady,
    RunPhaseChanged,
    RunResumed,
    Sampling,
    StopRequested,
)

AWAY = ("joining", "training", "returning", "offline")
"""Roles in which a cell's engine takes no calls."""


class Unknown(LookupError):
    """No such key so far."""


class Ended(LookupError):
    """The key's execution has ended, or a later attempt replaced it."""


@dataclass(frozen=True)
class AbortCalls:
    """Command: cut the execution's calls in flight that are of an attempt up to `attempt`."""

    execution: str
    attempt: int
    reason: str


class ProxyState(msgspec.Struct):
    """The latest process that served under a proxy's name."""

    incarnation: str
    url: str


class CellState(msgspec.Struct):
    incarnation: str = ""
    url: str = ""
    version: int = 0
    role: str = ""


@dataclass(slots=True)
class Execution:
    execution: str
    contexts: Contexts
    cell: int = -1
    sampling: Sampling = field(default_factory=Sampling)
    attempt: int = 0
    key_hash: str = ""
    harness: str = ""
    finished: bool = False
    records: dict[str, ModelCallRecorded] = field(default_factory=dict)  # share their bytes with the tree's nodes


class _Snapshot(msgspec.Struct):
    cells: dict[int, CellState]
    keys: dict[str, tuple[str, int]]
    executions: list[tuple[str, int, Sampling, int, str, str, bool, list[ModelCallRecorded]]]
    proxies: dict[str, ProxyState] = {}
    cuts: Cuts = msgspec.field(default_factory=Cuts)
    flights: Flights = msgspec.field(default_factory=Flights)
    ending: bool = False


class ProxyCore:
    def __init__(self) -> None:
        self.executions: dict[str, Execution] = {}
        self.keys: dict[str, tuple[str, int]] = {}  # hash -> (execution, attempt)
        self.cells: dict[int, CellState] = {}
        self.proxies: dict[str, ProxyState] = {}  # all that were ever ready in this run
        self.cuts = Cuts()
        self.flights = Flights()
        self.ending = False  # the run is over or was asked to stop: nobody goes on with what is in flight

    # ---------------------------------------------------------------------------------------------------- events

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        self.cuts.handle(event)
        self.flights.handle(event)
        match event:
            case ModelCallRecorded():
                self.learn(event)
            case ModelCallMarked():
                self.mark(event)
            case ProxyReady():
                self.proxies[event.proxy] = ProxyState(event.incarnation, event.url)
            case StopRequested():
                self.ending = True
            case RunResumed():
                self.ending = False
            case RunPhaseChanged():
                self.ending = self.ending or event.phase in ("finished", "failed")
            case ExecutionPlaced():
                execution = self._execution(event.execution)
                execution.cell, execution.sampling = event.cell, event.sampling
            case ExecutionMoved():
                if event.execution in self.executions:
                    self.executions[event.execution].cell = event.to_cell
            case ExecutionStarted():
                return self._started(event)
            case ExecutionFinished():
                return self._finished(event)
            case ExecutionAssessed():
                if self.executions.pop(event.execution, None) is not None:
                    return (Do(AbortCalls(event.execution, event.attempt, "the execution was assessed")),)
            case CellStarted() | CellEngineReady() | CellRefitted() | CellRoleChanged() | CellFailed():
                self._cell(event)
        return ()

    def learn(self, record: ModelCallRecorded) -> None:
        """Take in a durable record; records of executions that are over are of no use."""
        execution = self.executions.get(record.execution)
        if execution is None:
            return
        replaces = record.attempt > execution.contexts.tree.attempt
        if execution.contexts.add(record) is not None:
            if replaces:
                execution.records.clear()
            execution.records[record.call] = record

    def mark(self, event: ModelCallMarked) -> None:
        """Whether the harness got a call's reply, known better than when it was recorded."""
        execution = self.executions.get(event.execution)
        if execution is None or event.attempt != execution.contexts.tree.attempt:
            return
        record = execution.records.get(event.call)
        if record is not None:
            execution.records[event.call] = msgspec.structs.replace(record, discarded=event.discarded)
            execution.contexts.mark(event)

    def _execution(self, name: str) -> Execution:
        if name not in self.executions:
            self.executions[name] = Execution(name, Contexts(name))
        return self.executions[name]

    def _started(self, event: ExecutionStarted) -> Sequence[Effect]:
        execution = self._execution(event.execution)
        if event.attempt < execution.attempt:
            return ()
        before = execution.attempt
        self.keys[event.key_hash] = (event.execution, event.attempt)
        execution.attempt, execution.key_hash, execution.finished = event.attempt, event.key_hash, False
        execution.harness = event.harness
        if 0 < before < event.attempt:
            return (Do(AbortCalls(event.execution, before, "a new attempt replaced this one")),)
        return ()

    def _finished(self, event: ExecutionFinished) -> Sequence[Effect]:
        execution = self.executions.get(event.execution)
        if execution is None or event.attempt < execution.attempt:
            return ()
        execution.finished = True
        return (Do(AbortCalls(event.execution, event.attempt, "the execution has finished")),)

    def _cell(self, event: CellStarted | CellEngineReady | CellRefitted | CellRoleChanged | CellFailed) -> None:
        if isinstance(event, CellStarted):
            self.cells[event.cell] = CellState(event.incarnation)
            return
        cell = self.cells.setdefault(event.cell, CellState(event.incarnation))
        if cell.incarnation != event.incarnation:
            return  # said by a process that is gone
        if isinstance(event, CellEngineReady):
            cell.url, cell.version = event.url, event.version
        elif isinstance(event, CellRefitted):
            cell.version = event.version
        elif isinstance(event, CellRoleChanged):
            cell.role = event.role
        elif event.part == "engine":
            cell.url = ""

    # --------------------------------------------------------------------------------------------------- queries

    def identify(self, key_hash: str) -> Execution:
        """The execution that the key belongs to; raises Unknown or Ended."""
        known = self.keys.get(key_hash)
        if known is None:
            raise Unknown
        name, attempt = known
        execution = self.executions.get(name)
        if execution is None or execution.finished or execution.attempt != attempt:
            raise Ended(name)
        return execution

    def route(self, execution: str) -> tuple[int, str, int] | None:
        """(cell, engine URL, policy version) for the execution's calls; None while there is none."""
        state = self.executions.get(execution)
        cell = self.cells.get(state.cell) if state else None
        if state is None or cell is None or not cell.url or cell.role in AWAY:
            return None
        return state.cell, cell.url, cell.version

    # ------------------------------------------------------------------------------------------------- snapshots

    def snapshot(self) -> bytes:
        rows = [
            (e.execution, e.cell, e.sampling, e.attempt, e.key_hash, e.harness, e.finished, list(e.records.values()))
            for e in self.executions.values()
        ]
        parts = (self.proxies, self.cuts, self.flights, self.ending)
        return msgspec.msgpack.encode(_Snapshot(self.cells, self.keys, rows, *parts))

    @classmethod
    def restore(cls, data: bytes) -> ProxyCore:
        state = msgspec.msgpack.decode(data, type=_Snapshot)
        core = cls()
        core.cells, core.keys, core.proxies = state.cells, state.keys, state.proxies
        core.cuts, core.flights, core.ending = state.cuts, state.flights, state.ending
        for name, cell, sampling, attempt, key_hash, harness, finished, records in state.executions:
            execution = Execution(name, Contexts(name), cell, sampling, attempt, key_hash, harness, finished)
            core.executions[name] = execution
            for record in records:
                core.learn(record)
        return core
