"""The core driven event by event, for tests that show one behaviour. Nothing answers unless the test says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from services.scheduler.core import SchedulerCore
from shared import events as ev
from shared.actor import Effect, Publish
from tests.scheduler.world import Plan, run_config, run_started

E = TypeVar("E", bound=ev.Event)


@dataclass
class Hand:
    plan: Plan
    now: float = 0.0
    core: SchedulerCore = field(default_factory=SchedulerCore)
    last: list[Effect] = field(default_factory=list)  # of the last event
    events: list[ev.Event] = field(default_factory=list)  # all published

    def __post_init__(self) -> None:
        self.lives = dict.fromkeys(range(self.plan.cells), 0)
        self.give(run_started(self.plan, run_config(self.plan)))

    def give(self, *events: ev.Event, at: float | None = None) -> Hand:
        for event in events:
            self.now = self.now + 1.0 if at is None else at
            self.last = list(self.core.handle(event, self.now))
            self.events += self.published()
        return self

    def published(self) -> list[ev.Event]:
        return [e.event for e in self.last if isinstance(e, Publish)]

    def names(self) -> list[str]:
        return [ev.NAME_OF[type(e)] for e in self.published()]

    def all(self, kind: type[E]) -> list[E]:
        return [e for e in self.events if isinstance(e, kind)]

    # ---------------------------------------------------------------------------------------------------- cells

    def life(self, cell: int) -> str:
        return f"i{cell}-{self.lives[cell]}"

    def up(self, *cells: int, version: int = 0) -> Hand:
        for cell in cells:
            self.lives[cell] += 1
            life = self.life(cell)
            self.give(
                ev.CellStarted(cell=cell, incarnation=life),
                ev.CellTrainerReady(cell=cell, incarnation=life, version=version),
                ev.CellEngineReady(cell=cell, incarnation=life, url="", version=version, capacity=self.plan.capacity),
            )
        return self

    def all_up(self) -> Hand:
        return self.up(*range(self.plan.cells))

    def role(self, cell: int, role: str, previous: str = "") -> Hand:
        return self.give(
            ev.CellRoleChanged(
                cell=cell,
                incarnation=self.life(cell),
                order=self.core.state.cells[cell].order,
                role=role,
                previous=previous,
                seconds=0,
                version=0,
            )
        )

    def refitted(self, cell: int, version: int) -> Hand:
        return self.give(ev.CellRefitted(cell=cell, incarnation=self.life(cell), version=version, seconds=0))

    def died(self, cell: int) -> Hand:
        return self.give(ev.ServiceDied(service=f"cell-agent-{cell}", exit_code=-9, will_restart=True, log_tail=""))

    def joined(self, cell: int, batch: int, attempt: int = 1) -> Hand:
        return self.give(
            ev.CellJoinedBatch(
                cell=cell,
                incarnation=self.life(cell),
                batch=batch,
                attempt=attempt,
                version=batch - 1,
                pull_seconds=0,
            )
        )

    # ----------------------------------------------------------------------------------------- work, one by one

    def finish(self, *executions: str) -> Hand:
        for name in executions:
            self.give(
                ev.ExecutionFinished(
                    execution=name,
                    group=name.rsplit("x", 1)[0],
                    task="",
                    attempt=1,
                    ending="completed",
                    exit_code=0,
                    artifact=None,
                    seconds=0,
                    cpu_seconds=0,
                )
            )
        return self

    def group_done(self, number: int) -> Hand:
        """All executions of the group end, and it is ready."""
        group = f"g{number:06d}"
        self.finish(*(f"{group}x{i:02d}" for i in range(self.plan.executions)))
        return self.give(
            ev.GroupReady(group=group, policy_version=0, rewards=(), excluded=0, placeholders=0, tokens_generated=0)
        )

    def assign(self, number: int, batch: int, micro_steps: int = 1) -> Hand:
        group = f"g{number:06d}"
        path = ev.PathSelected(leaf="l", call_class="main_task", tokens=1)
        paths = {f"{group}x00": (path,) if micro_steps else ()}
        self.give(ev.GroupAssigned(group=group, batch=batch, policy_version=0, advantages={}, paths=paths))
        for i in range(micro_steps):
            self.give(
                ev.MicroStepReady(
                    micro_step=f"{group}-{i}",
                    batch=batch,
                    groups=(group,),
                    tokens=1,
                    path_tokens=1,
                    trained_tokens=1,
                    payload=b"",
                    blob=None,
                )
            )
        return self

    def seal(self, batch: int, numbers: list[int], micro_steps: list[str], executions: int = 1) -> Hand:
        return self.give(
            ev.BatchSealed(
                batch=batch,
                groups=tuple(f"g{n:06d}" for n in numbers),
                executions=executions,
                micro_steps=tuple(micro_steps),
                mean_reward=0,
                mean_staleness=0,
            )
        )

    def trained(self, cell: int, micro_step: str, batch: int = 1, attempt: int = 1, life: str = "") -> Hand:
        return self.give(
            ev.MicroStepTrained(
                micro_step=micro_step,
                batch=batch,
                attempt=attempt,
                cell=cell,
                incarnation=life or self.life(cell),
                tokens=1,
                seconds=0,
                metrics={},
            )
        )

    def committed(self, batch: int, attempt: int = 1) -> Hand:
        return self.give(
            ev.BatchCommitted(
                batch=batch,
                attempt=attempt,
                version=batch,
                cells=(0,),
                micro_steps=(),
                checkpoint="",
                seconds=0,
                metrics={},
            )
        )
