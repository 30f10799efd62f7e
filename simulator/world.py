"""A discrete-event world around the scheduler's own core: virtual time, simulated executions, cells and training.

Invariant: nothing here decides. `services.scheduler.core.SchedulerCore` gets the events that the live services would
publish and its effects are carried out; the world only says how long things take. One seed, one result, byte for byte:
ties in time are broken by the order of scheduling, and nothing iterates over a set.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from services.scheduler.core import SchedulerCore
from services.scheduler.policy import Policy, policy_for
from services.scheduler.state import Settings
from shared import events as ev
from shared.actor import Publish, Wake
from simulator.cells import DRAINING, JOINING, RETURNING, ROLLOUT, TRAINING, SimCell
from simulator.results import Meter, Result
from simulator.setup import Setup, run_started

HOUR = 3600.0
INCARNATION = "sim"
PATHS: dict[str, tuple[ev.PathSelected, ...]] = {"": (ev.PathSelected(leaf="", call_class="main_task", tokens=1),)}
SCORE = (0.0,)


class DeadLock(RuntimeError):
    """Nothing is left to happen although the run is not over: a fault of a policy or of the core."""


class World:
    """One run. `watch` sees every event, in order, with its time (tests and pictures)."""

    def __init__(
        self,
        setup: Setup,
        make_policy: Callable[[Settings], Policy] = policy_for,
        watch: Callable[[ev.Event, float], None] | None = None,
    ) -> None:
        self.setup = setup
        self.core = SchedulerCore(make_policy)
        self.meter = Meter(setup)
        self.now = 0.0
        self._watch = watch
        self.cells = [SimCell(k, setup.load_share, setup.load_at) for k in range(setup.engines)]
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ticket = 0
        self._queue: deque[ev.Event] = deque()
        self._phase = ""
        self._work: dict[str, float] = {}  # dispatched, not placed: seconds of work
        self._where: dict[str, SimCell] = {}
        self._group_of: dict[str, str] = {}
        self._drawn: tuple[str, list[float]] = ("", [])
        self._left: dict[str, int] = {}  # executions of a group that are not assessed
        self._version: dict[str, int] = {}  # policy version that a group was dispatched under
        self._dispatched_at: dict[str, float] = {}
        self._ready: deque[str] = deque()
        self._opened: ev.BatchOpened | None = None
        self._assigned: list[str] = []
        self._listed: list[str] = []
        self._queued: deque[str] = deque()  # micro-steps that nobody has claimed
        self._idle: list[int] = []  # heap of joined cells without work
        self._committed = 0
        self._part_s = setup.train_work_h * HOUR / (setup.groups * setup.parts)

    # ------------------------------------------------------------------------------------------------------ machinery

    def run(self) -> Result:
        self._deliver(run_started(self.setup))
        for cell in self.cells:
            k = cell.index
            self._deliver(ev.CellStarted(cell=k, incarnation=INCARNATION))
            if k < self.setup.cells:
                self._deliver(ev.CellTrainerReady(cell=k, incarnation=INCARNATION, version=0))
            self._deliver(
                ev.CellEngineReady(cell=k, incarnation=INCARNATION, url="", version=0, capacity=self.setup.capacity)
            )
        self._drain()
        timers = self._timers
        while self._phase not in ("finished", "failed"):
            if not timers:
                raise DeadLock(f"{self.setup.mode}: step {self._committed}, waterlevel {self.core.state.waterlevel}")
            self.now, _, action, args = heapq.heappop(timers)
            action(*args)
            if self._queue:
                self._drain()
        return self.meter.result(self.now, self._committed, self._phase, self.core.state.switches)

    def _at(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        self._ticket += 1
        heapq.heappush(self._timers, (self.now + delay, self._ticket, action, args))

    def _publish(self, event: ev.Event) -> None:
        self._queue.append(event)

    def _drain(self) -> None:
        queue = self._queue
        while queue:
            self._deliver(queue.popleft())

    def _deliver(self, event: ev.Event) -> None:
        """Give the core one event and carry out what it wants. Its own events need not come back to it."""
        if self._watch:
            self._watch(event, self.now)
        for effect in self.core.handle(event, self.now):
            if isinstance(effect, Publish):
                own = effect.event
                if self._watch:
                    self._watch(own, self.now)
                reaction = _REACTIONS.get(type(own))
                if reaction is not None:
                    reaction(self, own)
            elif isinstance(effect, Wake):
                self._at(max(0.0, effect.at - self.now), self._fire, effect.key)

    def _fire(self, key: str) -> None:
        self._publish(ev.TimerFired(service="scheduler", key=key))

    # ----------------------------------------------------------------------------------------------------- executions

    def _on_phase(self, event: ev.RunPhaseChanged) -> None:
        self._phase = event.phase

    def _on_dispatched(self, event: ev.ExecutionDispatched) -> None:
        group = event.group
        if self._drawn[0] != group:
            setup = self.setup
            self._drawn = (group, setup.durations.group(setup.seed, int(group[1:]), setup.executions))
            self._left[group] = setup.executions
            self._version[group] = event.policy_version
            self._dispatched_at[group] = self.now
        self._work[event.execution] = self._drawn[1][event.index] * HOUR
        self._group_of[event.execution] = group

    def _on_placed(self, event: ev.ExecutionPlaced) -> None:
        name, cell = event.execution, self.cells[event.cell]
        self._where[name] = cell
        self.meter.run(self.now, 1)
        cell.add(name, self._work.pop(name), self.now)
        self._schedule(cell)
        self._publish(ev.ExecutionStarted(execution=name, attempt=1, key_hash="", harness=""))

    def _on_moved(self, event: ev.ExecutionMoved) -> None:
        name, cell = event.execution, self.cells[event.to_cell]
        cell.add(name, self._where[name].take(name, self.now), self.now)
        self._where[name] = cell
        self._schedule(cell)

    def _schedule(self, cell: SimCell) -> None:
        following = cell.next_done()
        if following is not None and following[0] != cell.scheduled:
            cell.stamp += 1
            cell.scheduled = following[0]
            self._at(following[0] - self.now, self._completed, cell, cell.stamp)

    def _completed(self, cell: SimCell, stamp: int) -> None:
        if stamp != cell.stamp:
            return
        cell.scheduled = -1.0
        following = cell.next_done()
        if following is None:
            return
        if following[0] > self.now + 1e-6:  # it was slowed down, or moved
            self._schedule(cell)
            return
        name = following[1]
        cell.take(name, self.now)
        del self._where[name]
        self._schedule(cell)
        self.meter.run(self.now, -1)
        group = self._group_of.pop(name)
        self._publish(
            ev.ExecutionFinished(
                execution=name, group=group, task="", attempt=1, ending="completed", exit_code=0, artifact=None,
                seconds=0.0, cpu_seconds=0.0,
            )
        )  # fmt: skip
        self._left[group] -= 1
        if not self._left[group]:
            del self._left[group]
            self._at(self.setup.assess_s, self._group_is_ready, group)

    # --------------------------------------------------------------------------------------------------- trajectories

    def _group_is_ready(self, group: str) -> None:
        self.meter.group(self.now - self._dispatched_at.pop(group))
        self._ready.append(group)
        self._publish(
            ev.GroupReady(
                group=group, policy_version=self._version[group], rewards=SCORE, excluded=0, placeholders=0,
                tokens_generated=0,
            )
        )  # fmt: skip
        self._assign()

    def _on_batch_opened(self, event: ev.BatchOpened) -> None:
        self._opened, self._assigned, self._listed = event, [], []
        for cell in self.cells[: self.core.state.training]:
            if cell.role in (JOINING, TRAINING):
                self._at(self.setup.pull_s if cell.index else 0.0, self._join, cell)
        self._assign()

    def _assign(self) -> None:
        opened, ready, size = self._opened, self._ready, self.setup.groups
        if opened is None:
            return
        while ready and len(self._assigned) < size:
            group = ready.popleft()
            self._assigned.append(group)
            self._publish(
                ev.GroupAssigned(
                    group=group, batch=opened.batch, policy_version=self._version[group], advantages={}, paths=PATHS
                )
            )
            for _ in range(self.setup.parts):
                name = f"b{opened.batch:05d}m{len(self._listed):04d}"
                self._listed.append(name)
                self._publish(
                    ev.MicroStepReady(
                        micro_step=name, batch=opened.batch, groups=(group,), tokens=1, path_tokens=1, trained_tokens=1,
                        payload=b"", blob=None,
                    )
                )  # fmt: skip
                self._queued.append(name)
            if len(self._assigned) == size:
                self._seal(opened)
        self._claim()

    def _seal(self, opened: ev.BatchOpened) -> None:
        staleness = [opened.base_version - self._version.pop(group) for group in self._assigned]
        self.meter.consumed(staleness)
        self._publish(
            ev.BatchSealed(
                batch=opened.batch,
                groups=tuple(self._assigned),
                executions=len(self._assigned) * self.setup.executions,
                micro_steps=tuple(self._listed),
                mean_reward=0.0,
                mean_staleness=sum(staleness) / len(staleness),
            )
        )

    # --------------------------------------------------------------------------------------------------- cells, roles

    def _role(self, cell: SimCell, role: str) -> None:
        seconds, cell.since = self.now - cell.since, self.now
        previous, cell.role = cell.role, role
        self.meter.role(self.now, previous, role)
        self._publish(
            ev.CellRoleChanged(
                cell=cell.index, incarnation=INCARNATION, order=cell.order, role=role, previous=previous,
                seconds=seconds, version=cell.version,
            )
        )  # fmt: skip

    def _on_ordered(self, event: ev.CellRoleOrdered) -> None:
        cell = self.cells[event.cell]
        cell.order = event.order
        cell.joined = None
        if event.role == TRAINING:
            self._role(cell, DRAINING)
            self._at(self.setup.to_training_s, self._drained, cell, event.order)
        else:
            self._role(cell, RETURNING)
            self._at(self.setup.to_rollout_s, self._refitted, cell, event.version)

    def _on_refit(self, event: ev.RefitOrdered) -> None:
        self._at(self.setup.refit_s, self._refitted, self.cells[event.cell], event.version)

    def _refitted(self, cell: SimCell, version: int) -> None:
        cell.version = version
        self._publish(ev.CellRefitted(cell=cell.index, incarnation=INCARNATION, version=version, seconds=0.0))
        if cell.role == RETURNING:
            self._role(cell, ROLLOUT)

    def _drained(self, cell: SimCell, order: int) -> None:
        if cell.order == order and cell.role == DRAINING:
            self._role(cell, JOINING)
            self._join(cell)

    def _join(self, cell: SimCell) -> None:
        opened = self._opened
        if opened is None or cell.role not in (JOINING, TRAINING) or cell.joined == (opened.batch, opened.attempt):
            return
        cell.joined = (opened.batch, opened.attempt)
        self._publish(
            ev.CellJoinedBatch(
                cell=cell.index, incarnation=INCARNATION, batch=opened.batch, attempt=opened.attempt,
                version=opened.base_version, pull_seconds=0.0,
            )
        )  # fmt: skip
        if cell.role == JOINING:
            self._role(cell, TRAINING)
        heapq.heappush(self._idle, cell.index)
        self._claim()

    def _claim(self) -> None:
        while self._queued and self._idle:
            cell = self.cells[heapq.heappop(self._idle)]
            if cell.joined is not None:
                self._at(self._part_s, self._trained, cell, self._queued.popleft())

    def _trained(self, cell: SimCell, micro_step: str) -> None:
        batch, attempt = cell.joined or (0, 0)
        self.meter.trained(self._part_s)
        self._publish(
            ev.MicroStepTrained(
                micro_step=micro_step, batch=batch, attempt=attempt, cell=cell.index, incarnation=INCARNATION, tokens=1,
                seconds=self._part_s, metrics={},
            )
        )  # fmt: skip
        heapq.heappush(self._idle, cell.index)
        self._claim()

    def _on_reduce(self, event: ev.BatchReduceOrdered) -> None:
        self._at(self.setup.commit_s, self._commit, event)

    def _commit(self, event: ev.BatchReduceOrdered) -> None:
        self._idle.clear()
        self._opened = None
        for k in event.cells:
            self.cells[k].joined = None
        self._committed = event.batch
        self.meter.committed(self.now)
        self._publish(
            ev.BatchCommitted(
                batch=event.batch,
                attempt=event.attempt,
                version=event.batch,
                cells=event.cells,
                micro_steps=tuple(self._listed),
                checkpoint="",
                seconds=self.setup.commit_s,
                metrics={},
            )
        )


_REACTIONS: dict[type[ev.Event], Callable[[World, Any], None]] = {
    ev.RunPhaseChanged: World._on_phase,
    ev.ExecutionDispatched: World._on_dispatched,
    ev.ExecutionPlaced: World._on_placed,
    ev.ExecutionMoved: World._on_moved,
    ev.CellRoleOrdered: World._on_ordered,
    ev.RefitOrdered: World._on_refit,
    ev.BatchOpened: World._on_batch_opened,
    ev.BatchReduceOrdered: World._on_reduce,
}
