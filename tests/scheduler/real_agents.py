"""The real core of the cell agent in the scheduler's world: only what its shell does outside is scripted (time passes,
and the answer comes as an event). Shows that scheduler and cell agent mean the same by the same events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from services.cell_agent import commands as do
from services.cell_agent.core import CellCore
from services.cell_agent.moves import answer
from shared import events as ev
from shared.actor import Do, Publish, Wake
from shared.ids import call_id, request_id

if TYPE_CHECKING:
    from tests.scheduler.world import World


class RealAgent:
    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.trains = index < world.plan.cells
        self.core = CellCore(index, self.trains)
        self.lives = 0
        self.incarnation = ""
        self.owed: list[ev.Event] = []  # what the dead process would have published: its successor does
        self.claiming: tuple[int, int] | None = None
        self.admit: do.Admit | None = None  # the latest one
        self.refit: do.Refit | None = None
        self.reset()

    def reset(self) -> None:
        self.engine = False
        self.claiming = None
        self.reducing: tuple[int, int] | None = None
        self.void: set[tuple[int, int]] = set()
        for micro_step, holder in self.world.claims.items():
            if holder and holder[0] == self.index:
                self.world.claims[micro_step] = None

    # ---------------------------------------------------------------------------------------------- life, death

    def start(self) -> None:
        self.reset()
        self.lives += 1
        self.incarnation = f"i{self.index}-{self.lives}"
        for event in self.owed:
            self.world.publish(event)
        self.owed.clear()
        self.world.publish(ev.CellStarted(cell=self.index, incarnation=self.incarnation))

    def vanish(self) -> None:
        self.incarnation = ""
        self.reset()

    def die(self, by_failure: bool) -> None:
        incarnation = self.incarnation
        self.vanish()
        gone: ev.Event = ev.ServiceDied(
            service=f"cell-agent-{self.index}", exit_code=-9, will_restart=True, log_tail=""
        )
        if by_failure:
            gone = ev.CellFailed(cell=self.index, incarnation=incarnation, part="engine", reason="", log_tail="")
        self.world.after(1.0, lambda: self._restart(gone))

    def _restart(self, gone: ev.Event) -> None:
        if not self.incarnation and not self.world.stopped:
            self.world.publish(gone)
            self.world.after(5.0, lambda: None if self.incarnation or self.world.stopped else self.start())

    def later(self, mean: float, action: Callable[[], None]) -> None:
        mine = self.incarnation
        self.world.after(mean, lambda: action() if self.incarnation == mine and mine else None)

    def serves(self) -> bool:
        return bool(self.incarnation) and self.engine and str(self.core.state.role) in ("rollout", "draining")

    # ------------------------------------------------------------------------------------------- shell, scripted

    def react(self, event: Any) -> None:
        for effect in self.core.handle(event, self.world.now):
            if isinstance(effect, Publish):
                if self.incarnation:
                    self.world.publish(effect.event)
                else:
                    self.owed.append(effect.event)
            elif isinstance(effect, Wake):
                fired = ev.TimerFired(service="cell_agent", key=effect.key)
                self.world.at(effect.at - self.world.now, lambda fired=fired: self.world.publish(fired))
            elif isinstance(effect, Do) and self.incarnation:
                command: Any = effect.command
                if command.incarnation == self.incarnation:
                    self._perform(command)

    def _perform(self, command: Any) -> None:
        if isinstance(command, do.Restart):
            self.die(True)
        else:
            getattr(self, "_" + type(command).__name__.lower())(command)

    def tell(self, kind: Callable[..., ev.Event], **fields: Any) -> None:
        self.world.publish(kind(cell=self.index, incarnation=self.incarnation, **fields))

    def _weights(self, version: int) -> None:
        self.tell(ev.WeightsPublished, version=version, session="", address=0, nbytes=0, tensors=(), digest="")

    def _bringup(self, c: do.BringUp) -> None:
        def up() -> None:
            self.tell(ev.CellTrainerReady, version=c.version, store="s" if self.index == 0 else "")
            if self.index == 0:
                self._weights(c.version)

        if self.trains:
            self.later(10.0, up)

    def _admit(self, c: do.Admit) -> None:
        def up() -> None:
            if self.engine:
                return
            if c.weights is not None and self._overtaken(c.weights):
                assert self.core.state.admit or self.admit is not c, "nobody asks for the engine any more"
                return
            self.engine = True
            version = c.weights.version if c.weights else 0
            self.tell(ev.CellEngineReady, url="", version=version, capacity=self.world.plan.capacity)

        self.admit = c
        self.later(100.0, up)  # long enough for others to publish newer weights

    def _overtaken(self, weights: ev.WeightsPublished) -> bool:
        """Whether nobody has this snapshot any more: the agent's shell then waits for the next command."""
        return self.core.state.weights.get(weights.version) != weights

    def _drain(self, c: do.Drain) -> None:
        for number, (execution, target) in enumerate(self.core.state.moves.routes.items()):
            self._cut(c.order, execution, target, leased=number % 2 == 0)
        self.later(self.world.plan.switch_s, lambda: self.tell(ev.CellDrained, order=c.order, seconds=0.0))

    def _cut(self, order: int, execution: str, target: int, leased: bool) -> None:
        """Every execution that was moved has one live call here."""
        call = call_id(execution, 1, order)
        self.world.cuts += 1
        rid = request_id(call, self.world.cuts)
        lease = f"{rid}-{self.incarnation}" if leased else ""
        named = {"rid": rid, "call": call, "execution": execution, "lease": lease}
        cells = {"from_cell": self.index, "to_cell": target, "incarnation": self.incarnation}
        self.world.publish(ev.CallCut(**named, **cells, order=order, hold_s=15.0))

    def _adopt(self, c: do.Adopt) -> None:
        told = answer(c.cut, self.index, self.incarnation, "pages")
        self.later(0.1, lambda: self.world.publish(told))

    def _release(self, c: do.Release) -> None:
        named = {"rid": c.rid, "execution": c.execution, "lease": c.lease, "outcome": c.outcome}
        self.tell(ev.CallReleased, **named)

    def _canceldrain(self, c: do.CancelDrain) -> None:
        pass

    def _join(self, c: do.Join) -> None:
        fields = {"batch": c.batch, "attempt": c.attempt, "version": c.version, "pull_seconds": 0.0}
        self.later(self.world.plan.switch_s, lambda: self.tell(ev.CellJoinedBatch, **fields))

    def _refit(self, c: do.Refit) -> None:
        def loaded() -> None:
            if self._overtaken(c.weights):
                assert self.core.state.refit_issued < 0 or self.refit is not c, "nobody asks for newer weights any more"
                return
            self.tell(ev.CellRefitted, version=c.weights.version, seconds=0.0)

        self.refit = c
        self.later(self.world.plan.switch_s, loaded)

    def _claim(self, c: do.Claim) -> None:
        self.claiming = (c.batch, c.attempt)
        self._take(self.claiming)

    def _take(self, joined: tuple[int, int]) -> None:
        if self.claiming != joined:
            return
        free = [m for m, holder in self.world.claims.items() if holder is None and not self.core.trained_elsewhere(m)]
        if not free:
            self.later(1.0, lambda: self._take(joined))
            return
        self.world.claims[free[0]] = (self.index, self.incarnation)
        self.later(self.world.plan.train_s, lambda: self._trained(free[0], joined))

    def _trained(self, micro_step: str, joined: tuple[int, int]) -> None:
        if self.claiming == joined:
            fields = {"micro_step": micro_step, "batch": joined[0], "attempt": joined[1]}
            self.tell(ev.MicroStepTrained, **fields, tokens=9, seconds=0.0, metrics={})
            self._take(joined)

    def _seal(self, c: do.Seal) -> None:
        pass

    def _abandon(self, c: do.Abandon) -> None:
        if self.claiming == (c.batch, c.attempt):
            engine, incarnation = self.engine, self.incarnation
            self.reset()
            self.engine, self.incarnation = engine, incarnation
        self._void(c.batch, c.attempt)

    def _reduce(self, c: do.Reduce) -> None:
        self.claiming, self.reducing = None, (c.batch, c.attempt)

    def _commit(self, c: do.Commit) -> None:
        self.claiming, self.reducing = None, (c.batch, c.attempt)
        members = {k: self.world.agents[k].incarnation for k in c.cells}
        self.later(self.world.plan.switch_s, lambda: self._step(c, members))

    def _step(self, c: do.Commit, members: dict[int, str]) -> None:
        w = self.world
        if (c.batch, c.attempt) in self.void:
            return
        if any(w.agents[k].incarnation != i or not i for k, i in members.items()):
            self.die(True)  # the reduction broke
            return
        holders = {holder[0] for holder in w.claims.values() if holder}
        assert holders <= set(c.cells), "a gradient is outside the reduction"
        self._weights(c.version)
        fields = {"batch": c.batch, "attempt": c.attempt, "version": c.version, "cells": c.cells}
        w.publish(ev.BatchCommitted(**fields, micro_steps=c.micro_steps, checkpoint="", seconds=0.0, metrics={}))

    def _lostmember(self, c: do.LostMember) -> None:
        self._void(c.batch, c.attempt)

    def _void(self, batch: int, attempt: int) -> None:
        """Before the sum it is not made; in the sum the cell fails."""
        self.void.add((batch, attempt))
        if self.reducing == (batch, attempt) and self.world.rng.random() < 0.5:
            self.die(True)

    def _settle(self, c: do.Settle) -> None:
        self.claiming = None

    def _count(self, c: do.Count) -> None:
        pass

    def _export(self, c: do.Export) -> None:
        self.world.publish(ev.PolicyExported(version=c.version, path=""))
