"""What a reader of the stream knows about a run: a pure fold over its events.

Invariant: the same stream gives the same view, live or afterwards; live view, metrics, pictures and the `--json` line
are all made from it, so they cannot disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared import events as ev
from shared.codec import unpack_ids
from shared.ids import agent_cell

ROLES = ("offline", "rollout", "draining", "joining", "training", "returning")


@dataclass
class CellView:
    role: str = "offline"
    since: float = 0.0
    version: int = 0
    capacity: int = 0
    history: list[tuple[float, str]] = field(default_factory=list)

    def enter(self, role: str, now: float) -> None:
        if role != self.role or not self.history:
            self.history.append((now, role))
            self.role, self.since = role, now


@dataclass
class ExecutionView:
    purpose: str
    eval_set: str
    eval_phase: str
    state: str = "dispatched"  # dispatched, running, finished, assessed


@dataclass
class BatchView:
    batch: int
    reward: float = 0.0
    staleness: float = 0.0
    groups: int = 0
    executions: int = 0
    micro_steps: int = 0
    packed_tokens: int = 0
    path_tokens: int = 0
    trained_tokens: int = 0
    opened_at: float = 0.0
    committed_at: float = 0.0
    cells: tuple[int, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class RunView:
    """Mutable fold; `apply` takes events in stream order with the time the stream stored them."""

    run: str = ""
    run_dir: str = ""
    mode: str = ""
    steps: int = 0
    training_cells: int = 0  # cells that may train; those numbered after them are standalone engines
    main_set: str = ""
    phase: str = "starting"
    phase_reason: str = ""
    phases: list[tuple[float, str]] = field(default_factory=list)
    started_at: float = 0.0
    now: float = 0.0
    cells: dict[int, CellView] = field(default_factory=dict)
    executions: dict[str, ExecutionView] = field(default_factory=dict)
    batches: dict[int, BatchView] = field(default_factory=dict)
    waterlevel: list[tuple[float, int]] = field(default_factory=list)
    capacity: list[tuple[float, int]] = field(default_factory=list)
    ready_groups: int = 0
    dispatched: int = 0
    started: int = 0
    running: int = 0
    finished: int = 0
    assessed: int = 0
    trained: int = 0
    excluded: int = 0
    placeholders: int = 0
    evaluated: int = 0
    eval_scores: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    train_scores: list[tuple[float, float]] = field(default_factory=list)
    tokens_recorded: int = 0
    calls_taken_over: int = 0  # from a proxy that had died or stopped
    tokens_lost: int = 0  # generated, and known to be in no record
    tokens_trained: int = 0
    tokens_discarded: int = 0
    engine_tokens: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    calls_cut: int = 0
    calls_adopted: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by outcome
    page_tokens: int = 0  # that moved calls found computed where they went on
    call_times: list[tuple[float, int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    role_switches: int = 0
    errors: list[tuple[float, str]] = field(default_factory=list)
    policy_path: str = ""
    failed_starts: dict[int, int] = field(default_factory=dict)  # cell -> failures since it last stood
    failure_log: str = ""
    micro_steps: dict[str, ev.MicroStepReady] = field(default_factory=dict)
    losses: dict[str, dict[str, float]] = field(default_factory=dict)
    endings: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def apply(self, event: ev.Event, now: float) -> None:
        self.now = max(self.now, now)
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event, now)

    @property
    def level(self) -> int:
        """w(t): dispatched minus finished executions."""
        return self.dispatched - self.finished

    @property
    def committed(self) -> list[BatchView]:
        return [b for _, b in sorted(self.batches.items()) if b.committed_at]

    def cell(self, number: int) -> CellView:
        return self.cells.setdefault(number, CellView())

    def cell_name(self, number: int) -> str:
        """What a reader is shown: the core, cells that train as well, engines that never do."""
        if number == 0:
            return "core"
        return f"cell {number}" if number < self.training_cells else f"engine {number}"

    def batch(self, number: int) -> BatchView:
        return self.batches.setdefault(number, BatchView(batch=number))

    def error(self, now: float, text: str) -> None:
        self.errors.append((now, text))

    def eval_mean(self, phase: str, eval_set: str) -> float | None:
        scores = self.eval_scores.get((phase, eval_set))
        return sum(scores) / len(scores) if scores else None

    def note_levels(self, now: float) -> None:
        self.waterlevel.append((now, self.level))
        serving = sum(c.capacity for c in self.cells.values() if c.role == "rollout")
        if not self.capacity or self.capacity[-1][1] != serving:
            self.capacity.append((now, serving))


def _run_started(view: RunView, event: ev.RunStarted, now: float) -> None:
    view.run, view.run_dir, view.started_at = event.run, event.run_dir, event.started_at
    view.mode = event.config["scheduler"]["mode"]
    view.steps = event.config["training"]["steps"]
    sets = event.config["evaluation"]["sets"]
    view.main_set = event.config["evaluation"]["main"] or (sets[0]["name"] if sets else "")
    cells = event.config["cells"]
    view.training_cells, standalone = cells["count"], cells.get("standalone", 0)
    for number in range(view.training_cells + standalone):
        view.cell(number).enter("offline", now)


def _phase(view: RunView, event: ev.RunPhaseChanged, now: float) -> None:
    view.phase, view.phase_reason = event.phase, event.reason
    view.phases.append((now, event.phase))
    if event.phase == "failed":
        view.error(now, f"run failed: {event.reason}")


def _service_died(view: RunView, event: ev.ServiceDied, now: float) -> None:
    view.error(now, f"{event.service} ended with code {event.exit_code}" + ("" if event.will_restart else ", given up"))
    cell = agent_cell(event.service)
    if cell is not None:  # it gave up a start of its own without another CellFailed
        view.failed_starts[cell] = view.failed_starts.get(cell, 0) + 1
        view.failure_log = view.failure_log or event.log_tail  # it may have died before it could say why


def _dispatched(view: RunView, event: ev.ExecutionDispatched, now: float) -> None:
    view.executions[event.execution] = ExecutionView(event.purpose, event.eval_set, event.eval_phase)
    view.dispatched += 1
    view.note_levels(now)


def _started(view: RunView, event: ev.ExecutionStarted, now: float) -> None:
    execution = view.executions.get(event.execution)
    if execution is not None and execution.state == "dispatched":
        execution.state = "running"
        view.started += 1
        view.running += 1


def _finished(view: RunView, event: ev.ExecutionFinished, now: float) -> None:
    execution = view.executions.get(event.execution)
    if execution is None or execution.state in ("finished", "assessed"):
        return
    if execution.state == "running":
        view.running -= 1
    execution.state = "finished"
    view.finished += 1
    view.endings[event.ending] += 1
    view.seconds["executions"] += event.seconds
    view.seconds["harness_cpu"] += event.cpu_seconds
    view.note_levels(now)


def _assessed(view: RunView, event: ev.ExecutionAssessed, now: float) -> None:
    execution = view.executions.get(event.execution)
    if execution is None or execution.state == "assessed":
        return
    execution.state = "assessed"
    view.assessed += 1
    view.seconds["tests"] += event.seconds
    if event.status == "excluded":
        view.excluded += 1
    elif event.status == "placeholder":
        view.placeholders += 1
    if event.status != "excluded":
        if execution.purpose == "eval":
            view.evaluated += 1
            view.eval_scores[(execution.eval_phase, execution.eval_set)].append(event.score)
        else:
            view.train_scores.append((now, event.score))


def _group_ready(view: RunView, event: ev.GroupReady, now: float) -> None:
    view.ready_groups += 1


def _group_assigned(view: RunView, event: ev.GroupAssigned, now: float) -> None:
    view.ready_groups -= 1


def _micro_step(view: RunView, event: ev.MicroStepReady, now: float) -> None:
    view.micro_steps[event.micro_step] = ev.MicroStepReady(
        micro_step=event.micro_step, batch=event.batch, groups=event.groups, tokens=event.tokens,
        path_tokens=event.path_tokens, trained_tokens=event.trained_tokens, payload=None, blob=None,
    )  # fmt: skip


def _opened(view: RunView, event: ev.BatchOpened, now: float) -> None:
    view.batch(event.batch).opened_at = now


def _sealed(view: RunView, event: ev.BatchSealed, now: float) -> None:
    batch = view.batch(event.batch)
    batch.reward, batch.staleness = event.mean_reward, event.mean_staleness
    batch.groups, batch.executions, batch.micro_steps = len(event.groups), event.executions, len(event.micro_steps)


def _trained(view: RunView, event: ev.MicroStepTrained, now: float) -> None:
    view.seconds["training"] += event.seconds
    view.losses[event.micro_step] = event.metrics


def _mean_losses(parts: list[dict[str, float]]) -> dict[str, float]:
    """Means over a batch's micro-steps, weighted by loss entries; counts and the loss itself add up."""
    entries = sum(p.get("entries", 0.0) for p in parts)
    out = {"loss": sum(p.get("loss", 0.0) for p in parts), "entries": entries}
    for key in sorted({k for p in parts for k in p} - {"loss", "entries", "sequences"}):
        out[key] = sum(p.get(key, 0.0) * p.get("entries", 0.0) for p in parts) / entries if entries else 0.0
    return out


def _committed(view: RunView, event: ev.BatchCommitted, now: float) -> None:
    batch = view.batch(event.batch)
    losses = _mean_losses([view.losses.pop(m) for m in event.micro_steps if m in view.losses])
    batch.committed_at, batch.cells, batch.metrics = now, event.cells, losses | event.metrics
    for name in event.micro_steps:
        ready = view.micro_steps.get(name)
        if ready is not None:
            batch.packed_tokens += ready.tokens
            batch.path_tokens += ready.path_tokens
            batch.trained_tokens += ready.trained_tokens
    view.tokens_trained += batch.trained_tokens
    view.trained += batch.executions
    view.seconds["commit"] += event.seconds


def _role(view: RunView, event: ev.CellRoleChanged, now: float) -> None:
    cell = view.cell(event.cell)
    cell.enter(event.role, now)
    cell.version = event.version
    if event.previous in ("draining", "joining", "returning"):
        view.seconds["switching"] += event.seconds
    if event.role in ("training", "rollout") and event.previous not in ("offline", event.role):
        view.role_switches += 1
    view.note_levels(now)


def _cell_started(view: RunView, event: ev.CellStarted, now: float) -> None:
    view.cell(event.cell).enter("offline", now)


def _engine_ready(view: RunView, event: ev.CellEngineReady, now: float) -> None:
    cell = view.cell(event.cell)
    cell.capacity, cell.version = event.capacity, event.version
    view.failed_starts.pop(event.cell, None)
    view.note_levels(now)


def _refitted(view: RunView, event: ev.CellRefitted, now: float) -> None:
    view.cell(event.cell).version = event.version
    view.seconds["refit"] += event.seconds


def _cell_failed(view: RunView, event: ev.CellFailed, now: float) -> None:
    last = [line for line in event.log_tail.splitlines() if line.strip()][-3:]
    view.error(now, "\n".join([f"cell {event.cell} {event.part}: {event.reason}", *last]))
    view.failed_starts[event.cell] = view.failed_starts.get(event.cell, 0) + 1
    view.failure_log = event.log_tail


def _counted(view: RunView, event: ev.EngineCounted, now: float) -> None:
    view.engine_tokens[event.engine] = event.generated_tokens


def _recorded(view: RunView, event: ev.ModelCallRecorded, now: float) -> None:
    tokens = len(unpack_ids(event.output_ids))
    view.calls += 1
    view.tokens_recorded += tokens
    view.tokens_discarded += tokens if event.discarded else 0
    view.seconds["model_calls"] += event.seconds
    view.call_times.append((now, tokens))


def _begun(view: RunView, event: ev.ModelCallBegun, now: float) -> None:
    view.calls_taken_over += event.take > 0


def _dropped(view: RunView, event: ev.ModelCallDropped, now: float) -> None:
    view.tokens_lost += event.tokens


def _cut(view: RunView, event: ev.CallCut, now: float) -> None:
    view.calls_cut += 1


def _adopted(view: RunView, event: ev.CallAdopted, now: float) -> None:
    view.calls_adopted[event.outcome] += 1
    view.page_tokens += event.tokens_from_pages


def _refused(view: RunView, event: ev.ModelCallRefused, now: float) -> None:
    if event.status >= 500:
        view.error(now, f"{event.execution}: model call refused with {event.status} {event.kind}: {event.message}")


def _dead(view: RunView, event: ev.DeadLetter, now: float) -> None:
    view.error(now, f"dead letter of {event.service} (sequence {event.sequence}): {event.reason}")


def _exported(view: RunView, event: ev.PolicyExported, now: float) -> None:
    view.policy_path = event.path


_HANDLERS: dict[type[ev.Event], Callable[[RunView, Any, float], None]] = {
    ev.RunStarted: _run_started,
    ev.RunPhaseChanged: _phase,
    ev.ServiceDied: _service_died,
    ev.ExecutionDispatched: _dispatched,
    ev.ExecutionStarted: _started,
    ev.ExecutionFinished: _finished,
    ev.ExecutionAssessed: _assessed,
    ev.GroupReady: _group_ready,
    ev.GroupAssigned: _group_assigned,
    ev.MicroStepReady: _micro_step,
    ev.BatchOpened: _opened,
    ev.BatchSealed: _sealed,
    ev.MicroStepTrained: _trained,
    ev.BatchCommitted: _committed,
    ev.CellRoleChanged: _role,
    ev.CellStarted: _cell_started,
    ev.CellEngineReady: _engine_ready,
    ev.CellRefitted: _refitted,
    ev.CellFailed: _cell_failed,
    ev.EngineCounted: _counted,
    ev.ModelCallBegun: _begun,
    ev.ModelCallDropped: _dropped,
    ev.ModelCallRecorded: _recorded,
    ev.ModelCallRefused: _refused,
    ev.CallCut: _cut,
    ev.CallAdopted: _adopted,
    ev.DeadLetter: _dead,
    ev.PolicyExported: _exported,
}
