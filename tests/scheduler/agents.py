"""Scripted cell agent of the test world: roles as in the protocol, training against the world's micro-step queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shared import events as ev

if TYPE_CHECKING:
    from tests.scheduler.world import World


class CellAgent:
    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.trains = index < world.plan.cells
        self.lives = 0
        self.vanish()

    # ---------------------------------------------------------------------------------------------- life, death

    def vanish(self) -> None:
        """The process is gone, without a word."""
        self.incarnation = ""
        self.role = "offline"
        self.order = 0
        self.engine = self.trainer = False
        self.engine_version = self.refit = self.loading = -1
        self.joined: tuple[int, int] | None = None
        self.busy = False
        for micro_step, holder in self.world.claims.items():
            if holder and holder[0] == self.index:
                self.world.claims[micro_step] = None

    def start(self) -> None:
        w = self.world
        self.vanish()
        self.lives += 1
        self.incarnation = f"i{self.index}-{self.lives}"
        w.publish(ev.CellStarted(cell=self.index, incarnation=self.incarnation))
        if self.trains:
            self.later(10.0, self._trainer_up)
        self.later(10.0, self._engine_up)

    def die(self, by_failure: bool) -> None:
        w = self.world
        incarnation = self.incarnation
        self.vanish()
        gone: ev.Event = ev.ServiceDied(
            service=f"cell-agent-{self.index}", exit_code=-9, will_restart=True, log_tail=""
        )
        if by_failure:
            gone = ev.CellFailed(
                cell=self.index, incarnation=incarnation, part="engine", reason="scripted", log_tail=""
            )
        w.after(1.0, lambda: self._restart(gone))

    def _restart(self, gone: ev.Event) -> None:
        if self.incarnation or self.world.stopped:
            return  # the run was stopped (and resumed) meanwhile
        self.world.publish(gone)
        self.world.after(5.0, lambda: None if self.incarnation or self.world.stopped else self.start())

    def later(self, mean: float, action: Callable[[], None]) -> None:
        """Do it in a while, if this incarnation is still alive then."""
        mine = self.incarnation
        self.world.after(mean, lambda: action() if self.incarnation == mine and mine else None)

    def serves(self) -> bool:
        return bool(self.incarnation) and self.engine and self.role in ("rollout", "draining")

    # ---------------------------------------------------------------------------------------------------- roles

    def _trainer_up(self) -> None:
        self.trainer = True
        self.world.publish(
            ev.CellTrainerReady(cell=self.index, incarnation=self.incarnation, version=self.world.committed)
        )
        self._up()

    def _engine_up(self) -> None:
        self.engine = True
        self.engine_version = self.world.committed if self.world.rng.random() < 0.5 else 0
        self.world.publish(
            ev.CellEngineReady(
                cell=self.index,
                incarnation=self.incarnation,
                url="",
                version=self.engine_version,
                capacity=self.world.plan.capacity,
            )
        )
        self._up()

    def _up(self) -> None:
        if self.engine and (self.trainer or not self.trains):
            self._become("rollout")

    def _become(self, role: str) -> None:
        previous, self.role = self.role, role
        self.world.publish(
            ev.CellRoleChanged(
                cell=self.index,
                incarnation=self.incarnation,
                order=self.order,
                role=role,
                previous=previous,
                seconds=0.0,
                version=max(0, self.engine_version),
            )
        )

    def react(self, event: Any) -> None:
        if not self.incarnation:
            return
        mine = getattr(event, "cell", -1) == self.index
        if isinstance(event, ev.CellRoleOrdered) and mine:
            if self.role != "offline":  # else it was meant for the incarnation before
                self._obey(event)
        elif isinstance(event, ev.RefitOrdered) and mine:
            self._refit(event.version)
        elif isinstance(event, ev.BatchOpened) and self.role in ("joining", "training"):
            self.joined, self.busy = None, False
            self._join()
        elif isinstance(event, ev.MicroStepReady):
            self._claim()
        elif isinstance(event, ev.BatchReduceOrdered) and self.index == 0:
            self._reduce(event)

    def _obey(self, order: ev.CellRoleOrdered) -> None:
        assert self.trains, "a standalone engine was given an order"
        self.order = order.order
        self.joined, self.busy = None, False
        if order.role == "training" and self.role in ("rollout", "returning"):
            self._become("draining")
            self.later(self.world.plan.switch_s, lambda: self._drained(order))
        elif order.role == "rollout" and self.role in ("draining", "joining", "training"):
            self._become("returning")
            self._refit(order.version)

    def _drained(self, order: ev.CellRoleOrdered) -> None:
        if self.order == order.order and self.role == "draining":
            self._become("joining")
            self._join()

    def _refit(self, version: int) -> None:
        """One refit at a time, of the oldest published snapshot that will do."""
        self.refit = max(self.refit, version)
        if self.loading < 0 and self.engine:
            self.loading = max(self.refit, self.world.committed - 1)
            self.later(self.world.plan.switch_s, self._refitted)

    def _refitted(self) -> None:
        assert self.loading >= self.world.committed - 1, "the snapshot that the refit reads is no longer published"
        self.engine_version, self.loading = self.loading, -1
        self.world.publish(
            ev.CellRefitted(cell=self.index, incarnation=self.incarnation, version=self.engine_version, seconds=0.0)
        )
        if self.refit > self.engine_version:
            self._refit(self.refit)
        elif self.role == "returning":
            self._become("rollout")

    # ------------------------------------------------------------------------------------------------- training

    def _current(self) -> tuple[int, int] | None:
        """(batch, attempt) that can be joined."""
        opened = self.world.opened
        if opened is None or opened.batch != self.world.committed + 1:
            return None
        return (opened.batch, opened.attempt)

    def _join(self) -> None:
        self.later(self.world.plan.switch_s if self.index else 0.1, self._joined)

    def _joined(self) -> None:
        current = self._current()
        if self.role not in ("joining", "training") or current is None or self.joined == current:
            return
        self.joined = current
        self.world.publish(
            ev.CellJoinedBatch(
                cell=self.index,
                incarnation=self.incarnation,
                batch=current[0],
                attempt=current[1],
                version=self.world.committed,
                pull_seconds=0.0,
            )
        )
        if self.role == "joining":
            self._become("training")
        self._claim()

    def _claim(self) -> None:
        if self.joined is None or self.busy or self.joined != self._current():
            return
        free = next((m for m, holder in self.world.claims.items() if holder is None), None)
        if free is None:
            self.later(2.0, self._claim)  # something may be redelivered
            return
        self.world.claims[free] = (self.index, self.incarnation)
        self.busy = True
        attempt = self.joined
        self.later(self.world.plan.train_s, lambda: self._trained(free, attempt))

    def _trained(self, micro_step: str, joined: tuple[int, int]) -> None:
        if self.joined != joined or joined != self._current():
            return
        self.busy = False
        self.world.publish(
            ev.MicroStepTrained(
                micro_step=micro_step,
                batch=joined[0],
                attempt=joined[1],
                cell=self.index,
                incarnation=self.incarnation,
                tokens=9,
                seconds=0.0,
                metrics={},
            )
        )
        self._claim()

    def _reduce(self, order: ev.BatchReduceOrdered) -> None:
        members = {k: self.world.agents[k].incarnation for k in order.cells}
        self.later(self.world.plan.switch_s, lambda: self._step(order, members))

    def _step(self, order: ev.BatchReduceOrdered, members: dict[int, str]) -> None:
        w = self.world
        if (order.batch, order.attempt) != self._current():
            return
        if any(w.agents[k].incarnation != i or not i for k, i in members.items()):
            if w.rng.random() < 0.5:
                self.die(True)  # the broken reduction took the core's trainer with it
            return
        holders = {holder and holder[0] for holder in w.claims.values()}
        assert holders <= set(order.cells), "a gradient is outside the reduction"
        w.publish(
            ev.BatchCommitted(
                batch=order.batch,
                attempt=order.attempt,
                version=order.batch,
                cells=order.cells,
                micro_steps=tuple(w.micro_steps),
                checkpoint="",
                seconds=0.0,
                metrics={},
            )
        )
