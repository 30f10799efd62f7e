"""The books of a finished run, from its stream alone: what must hold whatever was killed or stopped on the way."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from shared import events as ev
from shared.codec import unpack_floats, unpack_ids
from shared.events import Event

ENGINE_GONE = ("cell-agent-", "engine-", "memory-")


@dataclass
class Audit:
    """`problems`: what is wrong, in words; `facts`: figures worth a look."""

    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def hold(self, true: bool, problem: str) -> None:
        if not true:
            self.problems.append(problem)


def audit(events: list[Event], *, steps: int, executions: int, struck: tuple[str, ...] = ()) -> Audit:
    """`executions`: how many the run must have dispatched. `struck`: the parts (processes.py) that were killed or
    stopped: tokens that an engine or a proxy took with it are counted, not held against the run."""
    a = Audit()
    _phase(a, events)
    _executions(a, events, executions)
    _batches(a, events, steps)
    _leases(a, events)
    _records(a, events, struck)
    _deaths(a, events, struck)
    return a


def _of(events: list[Event], kind: type[Any]) -> list[Any]:
    return [e for e in events if isinstance(e, kind)]


def _twice(things: Any) -> list[Any]:
    return sorted(t for t, n in Counter(things).items() if n > 1)


def _phase(a: Audit, events: list[Event]) -> None:
    phases = _of(events, ev.RunPhaseChanged)
    last = phases[-1] if phases else ev.RunPhaseChanged(phase="none")
    a.facts["phase"] = last.phase
    a.hold(last.phase == "finished", f"the run ended as {last.phase}: {last.reason[-300:]}")


def _executions(a: Audit, events: list[Event], expected: int) -> None:
    dispatched = [e.execution for e in _of(events, ev.ExecutionDispatched)]
    finished = [e.execution for e in _of(events, ev.ExecutionFinished)]
    assessed = [e.execution for e in _of(events, ev.ExecutionAssessed)]
    a.hold(len(dispatched) == expected, f"{len(dispatched)} executions were dispatched, not {expected}")
    for what, names in (("dispatched", dispatched), ("finished", finished), ("assessed", assessed)):
        a.hold(not _twice(names), f"{what} twice: {_twice(names)}")
    missing = sorted(set(dispatched) ^ set(finished))
    a.hold(not missing, f"dispatched but not finished, or the other way round: {missing}")
    a.hold(set(finished) == set(assessed), f"finished but not assessed: {sorted(set(finished) ^ set(assessed))}")
    endings = Counter(e.ending for e in _of(events, ev.ExecutionFinished))
    a.facts["endings"] = dict(endings)
    a.hold(set(endings) <= {"completed", "harness_timeout"}, f"harnesses did not get through: {dict(endings)}")
    a.facts["assessed"] = dict(Counter(e.status for e in _of(events, ev.ExecutionAssessed)))


def _batches(a: Audit, events: list[Event], steps: int) -> None:
    commits = _of(events, ev.BatchCommitted)
    numbers = [c.batch for c in commits]
    a.hold(numbers == list(range(1, steps + 1)), f"batches were committed as {numbers}, not 1..{steps}")
    committed = [m for c in commits for m in c.micro_steps]
    made = [m.micro_step for m in _of(events, ev.MicroStepReady)]
    a.hold(not _twice(committed), f"micro-steps in two commits: {_twice(committed)}")
    a.hold(not _twice(made), f"micro-steps made twice: {_twice(made)}")
    a.hold(set(made) == set(committed), f"micro-steps not in any commit, or unknown: {set(made) ^ set(committed)}")
    groups = [g.group for g in _of(events, ev.GroupAssigned)]
    ready = [g.group for g in _of(events, ev.GroupReady)]
    a.hold(not _twice(groups), f"groups in two batches: {_twice(groups)}")
    a.hold(sorted(set(groups)) == sorted(set(ready)), f"groups ready but never trained: {set(ready) ^ set(groups)}")
    _attributed(a, events, commits)
    a.facts["attempts"] = {b.batch: b.attempt for b in _of(events, ev.BatchOpened) if b.attempt > 1}
    a.facts["cells_of_commits"] = dict(Counter(len(c.cells) for c in commits))


def _attributed(a: Audit, events: list[Event], commits: list[ev.BatchCommitted]) -> None:
    """Each micro-step's gradient is in the buffer of exactly one incarnation that the reduction summed."""
    holders: dict[tuple[str, int], set[tuple[int, str]]] = defaultdict(set)
    live: dict[int, str] = {}
    order: dict[tuple[int, int], dict[int, str]] = {}
    for e in events:
        if isinstance(e, ev.CellStarted):
            live[e.cell] = e.incarnation
        elif isinstance(e, ev.MicroStepTrained):
            holders[e.micro_step, e.attempt].add((e.cell, e.incarnation))
        elif isinstance(e, ev.BatchReduceOrdered):
            order[e.batch, e.attempt] = {c: live[c] for c in e.cells}
    for c in commits:
        members = set(order.get((c.batch, c.attempt), {}).items())
        a.hold(set(c.cells) == {cell for cell, _ in members}, f"batch {c.batch}: summed over other cells than ordered")
        for m in c.micro_steps:
            inside = holders[m, c.attempt] & members
            a.hold(len(inside) == 1, f"{m} is in the gradients of {len(inside)} cells of its commit: {inside}")


def _leases(a: Audit, events: list[Event]) -> None:
    cut, released = _of(events, ev.CallCut), _of(events, ev.CallReleased)
    held = Counter(c.lease for c in cut if c.lease)
    let_go = Counter(r.lease for r in released)
    a.hold(held == let_go, f"leases not released exactly once: {(held - let_go) + (let_go - held)}")
    answers = Counter(e.rid for e in _of(events, ev.CallAdopted))
    a.hold(max(answers.values(), default=0) <= 1, f"calls adopted twice: {_twice(answers.elements())}")
    a.facts["cut"] = len(cut)
    a.facts["adopted"] = dict(Counter(e.outcome for e in _of(events, ev.CallAdopted)))
    a.facts["released"] = dict(Counter(e.outcome for e in released))


def _records(a: Audit, events: list[Event], struck: tuple[str, ...]) -> None:
    records = _of(events, ev.ModelCallRecorded)
    a.hold(not _twice(r.call for r in records), f"calls recorded twice: {_twice(r.call for r in records)}")
    for r in records:
        n = len(unpack_ids(r.output_ids))
        spans = [0, *(s.end for s in r.versions)]
        whole = [s.start for s in r.versions] == spans[:-1] and spans[-1] == n
        a.hold(whole and len(unpack_floats(r.output_logprobs)) == n, f"{r.call}: {n} tokens, versions {r.versions}")
    answers = Counter((r.execution, r.attempt, r.request) for r in records if not r.discarded and r.request)
    a.facts["answered_again"] = sum(n - 1 for n in answers.values())
    counted: dict[str, int] = {}
    for e in _of(events, ev.EngineCounted):
        counted[e.engine] = e.generated_tokens
    generated, recorded = sum(counted.values()), sum(len(unpack_ids(r.output_ids)) for r in records)
    a.facts["tokens"] = {"generated": generated, "recorded": recorded, "discarded": sum(r.discarded for r in records)}
    a.facts["tokens_unaccounted"] = generated - recorded
    if not any(part == "proxy" or part.startswith(ENGINE_GONE) for part in struck):
        a.hold(generated == recorded, f"engines generated {generated} tokens, the records hold {recorded}")
    elif "proxy" not in struck:  # an engine that was killed did not tell its last count: records may only hold more
        a.hold(generated <= recorded, f"engines generated {generated} tokens, the records hold only {recorded}")


def _deaths(a: Audit, events: list[Event], struck: tuple[str, ...]) -> None:
    letters = _of(events, ev.DeadLetter)
    a.hold(not letters, f"dead letters: {[(x.service, x.reason) for x in letters]}")
    deaths = _of(events, ev.ServiceDied)
    unasked = [(d.service, d.exit_code, d.log_tail[-1500:]) for d in deaths if d.service not in struck]
    a.hold(not unasked, f"services died that nobody touched: {unasked}")
    a.facts["services_died"] = dict(Counter(d.service for d in deaths))
    failed = _of(events, ev.CellFailed)
    a.facts["cells_failed"] = [f"{e.cell} {e.part}: {e.reason.splitlines()[0][:160]}" for e in failed]
    refused = Counter(f"{e.status} {e.kind}" for e in _of(events, ev.ModelCallRefused))
    a.facts["refused"] = dict(refused)
