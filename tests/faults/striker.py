"""Strikes at a run: watches its stream, kills or stops a process at a step, and tells whether that hit the step.

Several cases share one run: a case is armed when the cell that the last one took down is back. Meanwhile the evaluator
is held still, so that the run does not end before the cases do. A strike that came too late is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from services.cell_agent.engine.kv.errors import KvError
from services.cell_agent.engine.kv.secret import run_secret
from services.cell_agent.engine.kv.wire import Status
from services.cell_agent.engine.kv_client import KvClient
from shared import events as ev
from shared.stored import Stored
from tests.faults.live_run import LiveRun
from tests.faults.matrix import SIGNALS, STEPS, STOP_S, VICTIMS, Case, Routes, Switch
from tests.faults.processes import Processes, signal_all

TRIES = 4
LOOK_S = 0.3
UP_LIMIT_S = 240.0  # a struck cell is back by then, also one that is only stopped and must be noticed first
STEP_LIMIT_S = 240.0  # the step comes within so long, if the run goes on
REST_LIMIT_S = 30.0  # longer than any lease


class NotStruck(Exception):
    """The step did not come, or was over before the signal was sent."""


@dataclass
class Strike:
    case: str
    outcome: str = "not struck"  # struck, or why not
    tries: int = 0
    at: float = 0.0
    sequence: int = 0  # of the event with which the step began
    part: str = ""
    late_s: float = 0.0  # from the stored event (and after_s) to the signal
    recovered_s: float = -1.0  # until every cell was up again; -1: it was not, or the run was over before
    run_over: bool = False


@dataclass
class Watch:
    """The stream so far. `up`: cells whose engine and trainer stand."""

    log: list[Stored] = field(default_factory=list)
    routes: Routes = field(default_factory=Routes)
    incarnation: dict[int, str] = field(default_factory=dict)
    engines: dict[int, str] = field(default_factory=dict)  # cell -> url
    trainers: set[int] = field(default_factory=set)
    phase: str = ""
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    def see(self, message: Stored) -> None:
        event: Any = message.event
        self.log.append(message)
        if event is not None:
            self.routes.handle(event)
        match event:
            case ev.CellStarted():
                self._lost(event.cell)
                self.incarnation[event.cell] = event.incarnation
            case ev.CellFailed():
                self._lost(event.cell)
            case ev.ServiceDied() if event.service.startswith("cell-agent-"):
                self._lost(int(event.service.rsplit("-", 1)[1]))
            case ev.CellEngineReady() if self.incarnation.get(event.cell) == event.incarnation:
                self.engines[event.cell] = event.url
            case ev.CellTrainerReady() if self.incarnation.get(event.cell) == event.incarnation:
                self.trainers.add(event.cell)
            case ev.RunPhaseChanged():
                self.phase = event.phase
        self.grew.set()

    def _lost(self, cell: int) -> None:
        self.engines.pop(cell, None)
        self.trainers.discard(cell)

    def up(self, cells: int) -> bool:
        return len(self.engines) == len(self.trainers) == cells


class Striker:
    def __init__(self, run: LiveRun, cells: int, steps: int) -> None:
        self.run, self.cells, self.steps = run, cells, steps
        self.watch = Watch()
        self.processes = Processes(run.process.pid)
        self.strikes: list[Strike] = []
        self.rest: dict[int, Status | str] = {}  # cell -> what its engine held in the end, or why it did not say
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Striker:
        self._start(self._follow())
        self._start(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, action: Any) -> None:
        self._tasks.add(asyncio.create_task(action))

    async def _follow(self) -> None:
        async for message in self.run.bus.read():
            self.watch.see(message)

    async def _look(self) -> None:
        while True:
            await asyncio.to_thread(self.processes.look)
            await asyncio.sleep(LOOK_S)

    @property
    def over(self) -> bool:
        return self.watch.phase in ("finished", "failed") or self.run.process.poll() is not None

    # ------------------------------------------------------------------------------------------------------ strikes

    async def strike(self, cases: list[Case]) -> list[Strike]:
        """All cases, one after the other; the rest of a run that ended too early is "not struck"."""
        for case in cases:
            strike = Strike(case.name)
            self.strikes.append(strike)
            if not await self._until_up():
                strike.outcome = "not struck: the cells did not come up"
                return self.strikes
            try:
                await self._one(case, strike)
            except NotStruck as why:
                strike.outcome = f"not struck: {why}"
                continue
            strike.outcome = "struck"
            if await self._recovers(strike):
                strike.recovered_s = round(time.time() - strike.at, 1)
            strike.run_over = self.over
        return self.strikes

    async def _one(self, case: Case, strike: Strike) -> None:
        step = STEPS[case.step]
        deadline = time.monotonic() + STEP_LIMIT_S
        for strike.tries in range(1, TRIES + 1):
            begun, switch = await self._begin(case, deadline)
            if step.after_s:
                await asyncio.sleep(max(0.0, begun.time + step.after_s - time.time()))
            if self._ended(case, switch, begun):
                continue
            part = VICTIMS[case.victim](switch)
            reached = signal_all(self.processes.parts.get(part, []), SIGNALS[case.signal])
            strike.at, strike.part, strike.sequence = time.time(), part, begun.sequence
            if not reached:
                raise NotStruck(f"there is no process of {part}")
            strike.late_s = round(strike.at - begun.time - step.after_s, 4)
            if case.signal == "pause":
                await asyncio.sleep(STOP_S)
                signal_all(reached, signal.SIGCONT)
            await asyncio.sleep(0.2)  # what was stored before the strike has been read by then
            if not self._ended(case, switch, begun, strike.at):
                return
            raise NotStruck(f"{strike.late_s:.3f} s late")  # the process is gone all the same: the audit still counts
        raise NotStruck(f"the step was over {TRIES} times before the signal could be sent")

    async def _begin(self, case: Case, deadline: float) -> tuple[Stored, Switch]:
        at, step = len(self.watch.log), STEPS[case.step]
        while True:
            for message in self.watch.log[at:]:
                at += 1
                switch = step.begins(message.event, self.watch.routes) if message.event is not None else None
                if switch is not None and ("destination" not in case.victim or switch.destination >= 0):
                    return message, switch
            if self.over or time.monotonic() > deadline:
                raise NotStruck("the run was over" if self.over else f"no such step within {STEP_LIMIT_S:g} s")
            await self._grows()

    def _ended(self, case: Case, switch: Switch, begun: Stored, before: float = float("inf")) -> bool:
        ends = STEPS[case.step].ends
        later = (m for m in self.watch.log if m.sequence > begun.sequence and m.event is not None)
        return any(m.time < before and ends(m.event, switch) for m in later)

    async def _recovers(self, strike: Strike) -> bool:
        """First what was under way is committed or the cell is lost, then every cell comes back."""
        await asyncio.sleep(1.0)
        paused = signal_all(self.processes.parts.get("evaluator", []), signal.SIGSTOP)
        try:
            return await self._until_up()
        finally:
            signal_all(paused, signal.SIGCONT)

    async def _until_up(self) -> bool:
        deadline = time.monotonic() + UP_LIMIT_S
        while time.monotonic() < deadline and not self.over:
            if self.watch.up(self.cells) and self._alive():
                return True
            await self._grows()
        return False

    def _alive(self) -> bool:
        """Every part has its process: a death may not be in the stream yet. None is stopped."""
        wanted = [f"{p}-{k}" for p in ("cell-agent", "engine", "trainer") for k in range(self.cells)]
        if any(not self.processes.parts.get(part) for part in [*wanted, "proxy", "scheduler", "nats-server"]):
            return False
        return not any(_stopped(pid) for part in wanted for pid in self.processes.parts[part])

    async def _grows(self) -> None:
        self.watch.grew.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.watch.grew.wait(), 0.25)

    # --------------------------------------------------------------------------------------------------------- rest

    async def finish(self, limit_s: float) -> None:
        """Wait for the last commit, hold the supervisor still, and look whether all engines come to rest."""
        deadline = time.monotonic() + limit_s
        while not self.over and not self._last_commit():
            if time.monotonic() > deadline:
                return
            await self._grows()
        supervisor = [self.run.process.pid]
        signal_all(supervisor, signal.SIGSTOP)
        try:
            await self._rest()
        finally:
            signal_all(supervisor, signal.SIGCONT)

    def _last_commit(self) -> bool:
        late = (m.event for m in self.watch.log[-400:])
        return any(isinstance(e, ev.BatchCommitted) and e.batch == self.steps for e in late)

    async def _rest(self) -> None:
        client = KvClient(run_secret(self.run.folder), timeout_s=3.0)
        try:
            for cell, url in self.watch.engines.items():
                deadline = time.monotonic() + REST_LIMIT_S
                while time.monotonic() < deadline:
                    try:
                        self.rest[cell] = status = await client.status(url)
                        if status.at_rest:
                            break
                    except KvError as error:
                        self.rest[cell] = str(error)
                    await asyncio.sleep(0.5)
        finally:
            await client.close()


def _stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return True
