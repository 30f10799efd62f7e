"""A setup calibrated on a recorded run: a pure fold over its events.

Invariant: only what the run itself published is used: the time of its training executions, divided into model calls
and everything else; how calls slow down with the executions in their cell (load.py); seconds of micro-steps, pulls,
switches, refits and commits; and its run file. Durations are what they would have been at the run's mean load. Stops
and deaths are not modelled: a run that was resumed or lost a cell is measured as it was, simulated as if it had not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from shared import events as ev
from shared.config import from_plain
from simulator.files import BadSetup, of_run_file
from simulator.load import Call, Law, Presence, fit_law
from simulator.setup import Setup
from simulator.workloads import of_records

HOUR = 3600.0


@dataclass
class Recording:
    started: ev.RunStarted | None = None
    capacity: int = 0
    group_of: dict[str, str] = field(default_factory=dict)
    placed: dict[str, float] = field(default_factory=dict)
    lives: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))  # group -> execution
    where: dict[str, int] = field(default_factory=dict)  # every placed execution, also of evaluations
    presence: dict[int, Presence] = field(default_factory=lambda: defaultdict(Presence))
    calls: list[Call] = field(default_factory=list)
    last_finish: dict[str, float] = field(default_factory=dict)
    assess: list[float] = field(default_factory=list)
    trained: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    micro_steps: dict[int, int] = field(default_factory=dict)
    reduce_at: dict[int, float] = field(default_factory=dict)
    commit: list[float] = field(default_factory=list)
    committed_at: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    training_at: float = 0.0
    ordered: dict[int, float] = field(default_factory=dict)
    to_training: list[float] = field(default_factory=list)
    to_rollout: list[float] = field(default_factory=list)
    refit_at: dict[int, float] = field(default_factory=dict)
    refit: list[float] = field(default_factory=list)
    pulls: list[float] = field(default_factory=list)

    def apply(self, event: ev.Event, now: float) -> None:
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event, now)

    @property
    def hours_per_step(self) -> float:
        return (self.committed_at[-1] - self.training_at) / HOUR / len(self.committed_at)

    def setup(self) -> Setup:
        if self.started is None or not self.committed_at or not self.lives:
            raise BadSetup("the run has no committed training step yet: nothing to calibrate on")
        base = of_run_file(from_plain(self.started.config))
        steps = len(self.committed_at)
        law = fit_law(self.calls)
        groups, model_share = self._at_mean_load(law)
        pull_s = _mean(self.pulls or self.refit or self.to_rollout)  # all of them read a snapshot of the weights
        parts = sum(self.micro_steps.values()) / max(1, len(self.micro_steps)) / base.groups
        return replace(
            base,
            steps=steps,
            capacity=self.capacity or base.capacity,
            durations=of_records(groups, in_order=True),
            train_work_h=sum(self.trained.values()) / HOUR / steps,
            load_share=law.share * model_share,
            load_at=law.at,
            parts=max(1, round(parts)),
            commit_s=_mean(self.commit),
            assess_s=_mean(self.assess),
            to_training_s=_mean(self.to_training) + pull_s,
            to_rollout_s=_mean(self.to_rollout or self.refit),
            refit_s=_mean(self.refit or self.to_rollout),
            pull_s=pull_s,
        )

    def _at_mean_load(self, law: Law) -> tuple[list[list[float]], float]:
        """Hours of the executions by group, in dispatch order, and the share of model calls in them, both as they would
        have been at the mean load. Calls that overlap (sub-agents) share their execution's time."""
        took: dict[str, float] = defaultdict(float)
        at_mean: dict[str, float] = defaultdict(float)
        for call in self.calls:
            took[call.execution] += call.seconds
            at_mean[call.execution] += call.seconds * law.stretch(call.load)
        groups: list[list[float]] = []
        model = 0.0
        for _, lives in sorted(self.lives.items()):
            hours = []
            for execution, life in sorted(lives.items()):
                inside = min(life, took[execution])
                scaled = inside * (at_mean[execution] / took[execution] if took[execution] else 1.0)
                model += scaled / HOUR
                hours.append((life - inside + scaled) / HOUR)
            groups.append(hours)
        whole = sum(map(sum, groups))
        return groups, model / whole if whole else 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _started(r: Recording, e: ev.RunStarted, now: float) -> None:
    r.started = e


def _phase(r: Recording, e: ev.RunPhaseChanged, now: float) -> None:
    if e.phase == "training" and not r.training_at:
        r.training_at = now


def _engine(r: Recording, e: ev.CellEngineReady, now: float) -> None:
    r.capacity = e.capacity


def _dispatched(r: Recording, e: ev.ExecutionDispatched, now: float) -> None:
    if e.purpose == "train":
        r.group_of[e.execution] = e.group


def _placed(r: Recording, e: ev.ExecutionPlaced, now: float) -> None:
    r.placed[e.execution] = now
    r.where[e.execution] = e.cell
    r.presence[e.cell].change(now, 1)


def _moved(r: Recording, e: ev.ExecutionMoved, now: float) -> None:
    if e.execution in r.where:
        r.presence[r.where[e.execution]].change(now, -1)
        r.where[e.execution] = e.to_cell
        r.presence[e.to_cell].change(now, 1)


def _called(r: Recording, e: ev.ModelCallRecorded, now: float) -> None:
    seconds = e.seconds - e.queued_s
    if seconds > 0:
        load = r.presence[e.cell].mean(now - seconds, now)
        r.calls.append(Call(e.execution, seconds, len(e.output_ids) // 4, load))


def _finished(r: Recording, e: ev.ExecutionFinished, now: float) -> None:
    if e.execution in r.where:
        r.presence[r.where.pop(e.execution)].change(now, -1)
    if e.execution in r.group_of and e.execution in r.placed:
        group = r.group_of.pop(e.execution)
        r.lives[group][e.execution] = now - r.placed.pop(e.execution)
        r.last_finish[group] = now


def _ready(r: Recording, e: ev.GroupReady, now: float) -> None:
    if e.group in r.last_finish:
        r.assess.append(now - r.last_finish[e.group])


def _trained(r: Recording, e: ev.MicroStepTrained, now: float) -> None:
    r.trained[e.batch] += e.seconds


def _sealed(r: Recording, e: ev.BatchSealed, now: float) -> None:
    r.micro_steps[e.batch] = len(e.micro_steps)
    r.staleness.append(e.mean_staleness)


def _reduce(r: Recording, e: ev.BatchReduceOrdered, now: float) -> None:
    r.reduce_at[e.batch] = now


def _committed(r: Recording, e: ev.BatchCommitted, now: float) -> None:
    r.committed_at.append(now)
    if e.batch in r.reduce_at:
        r.commit.append(now - r.reduce_at[e.batch])


def _ordered(r: Recording, e: ev.CellRoleOrdered, now: float) -> None:
    r.ordered[e.cell] = now


def _role(r: Recording, e: ev.CellRoleChanged, now: float) -> None:
    if e.cell not in r.ordered or e.role not in ("joining", "rollout"):
        return
    times = r.to_training if e.role == "joining" else r.to_rollout
    times.append(now - r.ordered.pop(e.cell))


def _joined(r: Recording, e: ev.CellJoinedBatch, now: float) -> None:
    if e.cell:
        r.pulls.append(e.pull_seconds)


def _refit_ordered(r: Recording, e: ev.RefitOrdered, now: float) -> None:
    r.refit_at[e.cell] = now


def _refitted(r: Recording, e: ev.CellRefitted, now: float) -> None:
    if e.cell in r.refit_at:
        r.refit.append(now - r.refit_at.pop(e.cell))


_HANDLERS: dict[type[ev.Event], Callable[[Recording, Any, float], None]] = {
    ev.RunStarted: _started,
    ev.RunPhaseChanged: _phase,
    ev.CellEngineReady: _engine,
    ev.ExecutionDispatched: _dispatched,
    ev.ExecutionPlaced: _placed,
    ev.ExecutionMoved: _moved,
    ev.ModelCallRecorded: _called,
    ev.CellJoinedBatch: _joined,
    ev.ExecutionFinished: _finished,
    ev.GroupReady: _ready,
    ev.MicroStepTrained: _trained,
    ev.BatchSealed: _sealed,
    ev.BatchReduceOrdered: _reduce,
    ev.BatchCommitted: _committed,
    ev.CellRoleOrdered: _ordered,
    ev.CellRoleChanged: _role,
    ev.RefitOrdered: _refit_ordered,
    ev.CellRefitted: _refitted,
}
