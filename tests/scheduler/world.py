"""A small discrete-event world around the real scheduler core: scripted counterparts of the other services.

Everything random comes from one seeded generator. The stream is a queue: every event is given to the checker, the core
and the counterparts in turn; effects of the core are events behind it. Executions take random time (a long tail), wait
while their cell is lost, and sometimes fail; cells drain, join, train, refit and die; commits happen on the core only.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.scheduler.core import SchedulerCore
from shared import events as ev
from shared.actor import Effect, Publish, Wake
from shared.config import (
    CellsConfig,
    EvalSetConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    SchedulerConfig,
    TasksConfig,
    TrainingConfig,
)
from tests.scheduler.agents import CellAgent
from tests.scheduler.checks import Checks
from tests.scheduler.real_agents import RealAgent


@dataclass
class Plan:
    """What a test asks of the world."""

    seed: int = 0
    mode: str = "elastic"
    cells: int = 4
    standalone: int = 0
    capacity: int = 8
    mu: int = 2
    phi: float = 0.5
    groups: int = 4
    executions: int = 3
    steps: int = 6
    supply_fraction: float = 0.5
    supply_hold_s: float = 2.0
    async_cells: int = 1
    streaming: bool = True
    evaluate: int = 5
    mean_s: float = 60.0
    train_s: float = 2.0  # mean time of a micro-step
    switch_s: float = 3.0
    deaths_per_hour: float = 0.0
    most_deaths: int = 60  # in all: a core that dies more often than a batch takes can never commit one
    stops: int = 0
    failures: float = 0.1  # share of executions that never start, are excluded, or have no advantage
    real_agents: bool = False  # the cell agent's own core instead of the scripted one
    losses: tuple[tuple[int, str], ...] = ()  # when the log has so many events, who is lost: see World.lose
    max_events: int = 400_000

    @property
    def engines(self) -> int:
        return self.cells + self.standalone


@dataclass
class World:
    plan: Plan
    now: float = 1000.0
    log: list[tuple[ev.Event, float]] = field(default_factory=list)
    effects: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        p = self.plan
        self.rng = random.Random(p.seed)
        self.core = SchedulerCore()
        self.checks = Checks(p)
        self.config = run_config(p)
        self.queue: deque[ev.Event] = deque()
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.ticket = 0
        self.phase = ""
        self.stopped = False
        self.away: deque[tuple[ev.Event, float]] | None = None  # what the dead scheduler has not seen
        self.torn = False  # it is to die when it has published half of its effects
        self.owed: Sequence[Effect] = []  # the other half
        self.committed = 0
        self.deaths = 0
        self.cuts = 0
        self.routes: dict[str, int] = {}
        self.dispatch: dict[str, ev.ExecutionDispatched] = {}
        self.assessed: dict[str, int] = {}
        self.ready: deque[str] = deque()
        self.opened: ev.BatchOpened | None = None
        self.assigned: list[str] = []
        self.micro_steps: list[str] = []
        self.claims: dict[str, tuple[int, str] | None] = {}  # micro-step -> (cell, incarnation) holding it
        agent: type[CellAgent] | type[RealAgent] = RealAgent if p.real_agents else CellAgent
        self.agents = [agent(self, k) for k in range(p.engines)]

    # ------------------------------------------------------------------------------------------------ machinery

    def at(self, delay: float, action: Callable[[], None]) -> None:
        self.ticket += 1
        heapq.heappush(self.timers, (self.now + delay, self.ticket, action))

    def after(self, mean: float, action: Callable[[], None]) -> None:
        self.at(self.rng.uniform(0.5, 1.5) * mean, action)

    def publish(self, event: ev.Event) -> None:
        self.queue.append(event)

    def run(self) -> World:
        """Until the run is over; fails when nothing is left to happen before that."""
        self.publish(run_started(self.plan, self.config))
        for agent in self.agents:
            agent.start()
        if self.plan.deaths_per_hour:
            self._plan_death()
        for _ in range(self.plan.stops):
            self.at(self.rng.uniform(10, 4000), self._stop)
        while True:
            while self.queue:
                self._deliver(self.queue.popleft())
            if self.phase in ("finished", "failed"):
                return self
            assert self.timers, f"dead-lock in phase {self.phase} at step {self.committed}: {self.core.state}"
            assert len(self.log) < self.plan.max_events, f"no end in phase {self.phase} at step {self.committed}"
            self.now, _, action = heapq.heappop(self.timers)
            action()

    def _deliver(self, event: ev.Event) -> None:
        self.log.append((event, self.now))
        for count, party in self.plan.losses:
            if count == len(self.log):
                self.lose(party)
        if self.away is None:
            self._say(self._decide(event, self.now))
        elif self.torn:
            said = self._decide(event, self.now)
            self._say(said[: len(said) // 2])
            self.owed, self.torn = said[len(said) // 2 :], False
        else:
            self.away.append((event, self.now))
        self._react(event)

    def lose(self, party: str) -> None:
        """`scheduler`, `agent-K` (the process) or `part-K` (its engine or trainer), before it reacts to the event that
        was stored last; `publisher`: the scheduler when it has published half of what the event makes it say. Once it
        is back it says the rest, then sees what it missed, as of when it was stored."""
        kind, _, cell = party.partition("-")
        if kind in ("scheduler", "publisher"):
            if self.away is None:
                self.away, self.torn = deque(), kind == "publisher"
                self.after(3.0, self._scheduler_is_back)
        elif self.agents[int(cell)].incarnation:
            self.agents[int(cell)].die(kind == "part")

    def _scheduler_is_back(self) -> None:
        missed, self.away = self.away or deque(), None
        self._say(self.owed)
        self.owed = []
        for event, at in missed:
            self._say(self._decide(event, at))

    def _decide(self, event: ev.Event, now: float) -> Sequence[Effect]:
        self.checks.see(event)
        effects = self.core.handle(event, now)
        self.checks.decided(effects)
        self.effects.append(encode_effects(effects))
        return effects

    def _say(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self.publish(effect.event)
            elif isinstance(effect, Wake):
                fired = ev.TimerFired(service="scheduler", key=effect.key)
                self.at(max(0.0, effect.at - self.now), lambda fired=fired: self.publish(fired))

    def _react(self, event: Any) -> None:
        react = getattr(self, "_on_" + ev.NAME_OF[type(event)], None)
        if react:
            react(event)
        for agent in self.agents:
            agent.react(event)

    # -------------------------------------------------------------------------------------- harness, evaluation

    def _on_run_phase_changed(self, event: ev.RunPhaseChanged) -> None:
        self.phase = event.phase

    def _on_execution_dispatched(self, event: ev.ExecutionDispatched) -> None:
        self.dispatch[event.execution] = event

    def _on_execution_placed(self, event: ev.ExecutionPlaced) -> None:
        self.routes[event.execution] = event.cell
        name = event.execution
        if self.rng.random() < self.plan.failures / 2:
            self.after(1.0, lambda: self._finish(event, "failed_to_start"))
            return
        started = ev.ExecutionStarted(execution=name, attempt=1, key_hash="", harness="scripted")
        self.after(0.2, lambda: self.publish(started))
        length = self.rng.expovariate(1 / self.plan.mean_s) + 1.0
        self.at(length, lambda: self._finish(event, "completed"))

    def _on_execution_moved(self, event: ev.ExecutionMoved) -> None:
        self.routes[event.execution] = event.to_cell

    def _finish(self, placed: ev.ExecutionPlaced, ending: str) -> None:
        name = placed.execution
        if self.stopped or not (ending == "failed_to_start" or self.agents[self.routes[name]].serves()):
            self.after(5.0, lambda: self._finish(placed, ending))  # calls wait for a route
            return
        self.publish(
            ev.ExecutionFinished(
                execution=name,
                group=placed.group,
                task=placed.task,
                attempt=1,
                ending=ending,
                exit_code=0,
                artifact=None,
                seconds=0,
                cpu_seconds=0,
            )
        )

    def _on_execution_finished(self, event: ev.ExecutionFinished) -> None:
        status = "placeholder" if event.ending == "failed_to_start" else "scored"
        if self.rng.random() < self.plan.failures / 2:
            status = "excluded"
        assessed = ev.ExecutionAssessed(
            execution=event.execution,
            group=event.group,
            attempt=1,
            artifact="",
            branch="",
            status=status,
            score=self.rng.random(),
            tries=1,
            seconds=0,
        )
        self.after(1.0, lambda: self.publish(assessed))

    # --------------------------------------------------------------------------------------------- trajectories

    def _on_execution_assessed(self, event: ev.ExecutionAssessed) -> None:
        dispatched = self.dispatch[event.execution]
        if dispatched.purpose == "eval":
            return
        self.assessed[event.group] = self.assessed.get(event.group, 0) + 1
        if self.assessed[event.group] == self.plan.executions:
            self.ready.append(event.group)
            self.publish(
                ev.GroupReady(
                    group=event.group,
                    policy_version=dispatched.policy_version,
                    rewards=(0.5,),
                    excluded=0,
                    placeholders=0,
                    tokens_generated=0,
                )
            )
            self._assign()

    def _on_batch_opened(self, event: ev.BatchOpened) -> None:
        if event.attempt == 1:
            self.assigned, self.micro_steps, self.claims = [], [], {}
        for micro_step in self.claims:
            self.claims[micro_step] = None
        self.opened = event
        if event.attempt == 1:
            self._assign()

    def _assign(self) -> None:
        opened = self.opened
        if opened is None or opened.batch != self.committed + 1:
            return
        while self.ready and len(self.assigned) < opened.groups:
            group = self.ready.popleft()
            self.assigned.append(group)
            some = self.rng.random() > self.plan.failures
            path = ev.PathSelected(leaf="l", call_class="main_task", tokens=9)
            version = self.dispatch[f"{group}x00"].policy_version
            self.publish(
                ev.GroupAssigned(
                    group=group,
                    batch=opened.batch,
                    policy_version=version,
                    advantages={f"{group}x00": 1.0},
                    paths={f"{group}x00": (path,) if some else ()},
                )
            )
            for _ in range(self.rng.randint(1, 3) if some else 0):
                self._add_micro_step(opened.batch, group)
            if len(self.assigned) == opened.groups:
                self._seal(opened)

    def _add_micro_step(self, batch: int, group: str) -> None:
        name = f"b{batch:05d}m{len(self.micro_steps):04d}"
        self.micro_steps.append(name)
        self.claims[name] = None
        self.publish(
            ev.MicroStepReady(
                micro_step=name,
                batch=batch,
                groups=(group,),
                tokens=9,
                path_tokens=9,
                trained_tokens=9,
                payload=b"",
                blob=None,
            )
        )

    def _seal(self, opened: ev.BatchOpened) -> None:
        staleness = [opened.base_version - self.dispatch[f"{g}x00"].policy_version for g in self.assigned]
        self.publish(
            ev.BatchSealed(
                batch=opened.batch,
                groups=tuple(self.assigned),
                executions=len(self.assigned),
                micro_steps=tuple(self.micro_steps),
                mean_reward=0.5,
                mean_staleness=sum(staleness) / len(staleness),
            )
        )

    def _on_batch_committed(self, event: ev.BatchCommitted) -> None:
        self.committed = event.version

    # --------------------------------------------------------------------------------------------------- faults

    def _plan_death(self) -> None:
        self.at(self.rng.expovariate(self.plan.deaths_per_hour / 3600), self._death)

    def _death(self) -> None:
        victim = self.agents[self.rng.randrange(self.plan.engines)]
        if victim.incarnation and not self.stopped and self.phase != "starting":
            victim.die(self.rng.random() < 0.5)
            self.deaths += 1
        if self.deaths < self.plan.most_deaths:
            self._plan_death()

    def _stop(self) -> None:
        if self.stopped or self.phase in ("", "starting"):
            return
        self.stopped = True
        self.publish(ev.StopRequested(reason="scripted"))
        self.after(20.0, self._kill_all)

    def _kill_all(self) -> None:
        for agent in self.agents:
            agent.vanish()
        self.after(50.0, self._resume)

    def _resume(self) -> None:
        self.stopped = False
        self.publish(ev.RunResumed(resumed_at=self.now))
        for agent in self.agents:
            agent.start()


def run_config(p: Plan) -> RunConfig:
    sets = (EvalSetConfig(name="held", tasks="x", executions=p.evaluate),) if p.evaluate else ()
    return RunConfig(
        name="world",
        seed=p.seed,
        model=ModelConfig(path="m"),
        tasks=TasksConfig(train="t"),
        evaluation=EvaluationConfig(sets=sets),
        cells=CellsConfig(count=p.cells, standalone=p.standalone, capacity=p.capacity),
        scheduler=SchedulerConfig(
            mode=p.mode,  # type: ignore[arg-type]
            mu=p.mu,
            phi=p.phi,
            groups_per_batch=p.groups,
            executions_per_group=p.executions,
            supply_fraction=p.supply_fraction,
            supply_hold_s=p.supply_hold_s,
            async_training_cells=p.async_cells,
            streaming=p.streaming,
        ),
        training=TrainingConfig(steps=p.steps),
    )


def run_started(p: Plan, config: RunConfig) -> ev.RunStarted:
    return ev.RunStarted(
        run="world",
        config=msgspec.to_builtins(config),
        run_dir="",
        train_tasks=tuple(f"/t/{i}" for i in range(7)),
        eval_tasks={"held": ("/e/0", "/e/1", "/e/2")},
        started_at=0.0,
    )


def encode_effects(effects: Any) -> bytes:
    plain = [(ev.NAME_OF[type(e.event)], e.event) if isinstance(e, Publish) else ("wake", e.at, e.key) for e in effects]
    return msgspec.msgpack.encode(plain)
