"""Trajectory buffer: call records by execution, executions by group.

Owns: what is known of every training execution that no batch has consumed, and when a group is ready. Invariants:
only executions dispatched with purpose "train" are kept; the latest attempt wins; an execution settles once (finished
and assessed, both of its latest attempt) and nothing that arrives later changes it; a group is ready when all of its
N executions are settled; a consumed group's data is gone and its id never opens a group again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from shared.codec import pack_floats, pack_ids
from shared.events import (
    ExecutionAssessed,
    ExecutionDispatched,
    ExecutionFinished,
    ExecutionStarted,
    ModelCallMarked,
    ModelCallRecorded,
    Sampling,
    VersionSpan,
)
from shared.tree import CLASSES, Node, Tree, TreeError

SCORED, EXCLUDED, PLACEHOLDER = STATUSES = ("scored", "excluded", "placeholder")


class BadAssessment(ValueError):
    """An assessment that no rule covers; the evaluator has to publish one of the known statuses."""


class GroupFull(ValueError):
    """More executions dispatched than scheduler.executions_per_group; the scheduler has to open another group."""


@dataclass(eq=False)
class Execution:
    """`attempt` is the latest one seen; `status` is "" until an assessment of that attempt came."""

    execution: str
    group: str
    attempt: int = 0
    finished: bool = False
    status: str = ""
    score: float = 0.0
    generated: int = 0  # output tokens recorded by the latest attempt
    tree: Tree = field(default_factory=Tree)

    @property
    def settled(self) -> bool:
        # What never produced anything may be assessed without an ExecutionFinished.
        return bool(self.status) and (self.finished or self.status != SCORED)

    def renew(self, attempt: int) -> None:
        """A later attempt exists: forget what the earlier ones did."""
        self.attempt, self.finished, self.status, self.score, self.generated = attempt, False, "", 0.0, 0
        self.tree = Tree()
        self.tree.attempt = attempt


@dataclass(eq=False)
class Group:
    group: str
    policy_version: int
    executions: list[Execution] = field(default_factory=list)  # in dispatch order

    def of(self, status: str) -> list[Execution]:
        return [e for e in self.executions if e.status == status]

    @property
    def counted(self) -> list[Execution]:
        """Executions that have a reward: they enter the statistics and the divisor of the loss."""
        return [e for e in self.executions if e.status in (SCORED, PLACEHOLDER)]


class Groups:
    """All groups between dispatch and consumption; `size` = N."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.groups: dict[str, Group] = {}
        self.executions: dict[str, Execution] = {}
        self.consumed: set[str] = set()

    def dispatched(self, event: ExecutionDispatched) -> None:
        if event.purpose != "train" or event.group in self.consumed or event.execution in self.executions:
            return
        group = self.groups.setdefault(event.group, Group(event.group, event.policy_version))
        if len(group.executions) >= self.size:
            raise GroupFull(f"{event.execution} is one more than the {self.size} executions of {event.group}")
        execution = Execution(event.execution, event.group)
        group.executions.append(execution)
        self.executions[event.execution] = execution

    def started(self, event: ExecutionStarted) -> None:
        self._open(event.execution, event.attempt)

    def recorded(self, event: ModelCallRecorded) -> None:
        """Raises TreeError if the record cannot be a node of its execution's tree."""
        if event.call_class not in CLASSES:
            raise TreeError(f"call {event.call} has class {event.call_class!r}; known are {', '.join(CLASSES)}")
        execution = self._open(event.execution, event.attempt)
        if execution is not None and execution.tree.add(event) is not None:
            execution.generated += len(event.output_ids) // 4

    def marked(self, event: ModelCallMarked) -> None:
        execution = self._open(event.execution, event.attempt)
        if execution is not None:
            execution.tree.mark(event.call, event.attempt, discarded=event.discarded)

    def finished(self, event: ExecutionFinished) -> Group | None:
        """The event's group, if that made it ready."""
        execution = self._open(event.execution, event.attempt)
        if execution is None:
            return None
        execution.finished = True
        return self._settle(execution)

    def assessed(self, event: ExecutionAssessed) -> Group | None:
        """The event's group, if that made it ready."""
        if event.status not in STATUSES:
            raise BadAssessment(f"{event.execution} is {event.status!r}; known statuses are {', '.join(STATUSES)}")
        execution = self._open(event.execution, event.attempt)
        if execution is None:
            return None
        execution.status = event.status
        execution.score = event.score if event.status == SCORED else 0.0
        return self._settle(execution)

    def consume(self, name: str) -> Group:
        """Hand the group out and forget it."""
        group = self.groups.pop(name)
        for execution in group.executions:
            del self.executions[execution.execution]
        self.consumed.add(name)
        return group

    def _open(self, name: str, attempt: int) -> Execution | None:
        """The execution, if it is kept, not settled, and `attempt` is not of the past."""
        execution = self.executions.get(name)
        if execution is None or execution.settled or attempt < execution.attempt:
            return None
        if attempt > execution.attempt:
            execution.renew(attempt)
        return execution

    def _settle(self, execution: Execution) -> Group | None:
        if not execution.settled:
            return None
        if execution.status != SCORED:
            execution.tree = Tree()  # nothing of it will be trained
        group = self.groups[execution.group]
        ready = len(group.executions) == self.size and all(e.settled for e in group.executions)
        return group if ready else None


# ------------------------------------------------------------------------------------------------------- snapshot


class SavedCall(msgspec.Struct, frozen=True, array_like=True):
    call: str
    parent: str
    kept: int
    call_class: str
    input_ids: bytes
    output_ids: bytes
    output_logprobs: bytes
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    context: str
    diverged: bool
    discarded: bool


class SavedExecution(msgspec.Struct, frozen=True, array_like=True):
    execution: str
    attempt: int
    finished: bool
    status: str
    score: float
    generated: int
    calls: tuple[SavedCall, ...]


class SavedGroup(msgspec.Struct, frozen=True, array_like=True):
    group: str
    policy_version: int
    executions: tuple[SavedExecution, ...]


class SavedGroups(msgspec.Struct, frozen=True, array_like=True):
    size: int
    groups: tuple[SavedGroup, ...]
    consumed: tuple[str, ...]


def save(groups: Groups) -> SavedGroups:
    return SavedGroups(
        groups.size,
        tuple(
            SavedGroup(g.group, g.policy_version, tuple(_save_execution(e) for e in g.executions))
            for g in groups.groups.values()
        ),
        tuple(sorted(groups.consumed)),
    )


def load(saved: SavedGroups) -> Groups:
    groups = Groups(saved.size)
    groups.consumed = set(saved.consumed)
    for old in saved.groups:
        group = groups.groups[old.group] = Group(old.group, old.policy_version)
        for one in old.executions:
            execution = _load_execution(one, old.group)
            group.executions.append(execution)
            groups.executions[one.execution] = execution
    return groups


def _save_execution(e: Execution) -> SavedExecution:
    calls = tuple(_save_call(node) for node in e.tree.nodes.values())
    return SavedExecution(e.execution, e.attempt, e.finished, e.status, e.score, e.generated, calls)


def _save_call(node: Node) -> SavedCall:
    return SavedCall(
        call=node.call,
        parent=node.parent,
        kept=node.kept,
        call_class=node.call_class,
        input_ids=pack_ids(node.input_ids),
        output_ids=pack_ids(node.output_ids),
        output_logprobs=pack_floats(node.output_logprobs),
        versions=node.versions,
        finish_reason=node.finish_reason,
        context=node.context,
        diverged=node.diverged,
        discarded=node.discarded,
    )


def _load_execution(saved: SavedExecution, group: str) -> Execution:
    tree = Tree()
    tree.attempt = saved.attempt
    for call in saved.calls:
        tree.add(_record(call, saved.execution, saved.attempt))
    return Execution(
        saved.execution, group, saved.attempt, saved.finished, saved.status, saved.score, saved.generated, tree
    )


def _record(call: SavedCall, execution: str, attempt: int) -> ModelCallRecorded:
    return ModelCallRecorded(
        call=call.call,
        execution=execution,
        attempt=attempt,
        cell=0,
        parent=call.parent,
        keep=call.kept,
        call_class=call.call_class,
        input_ids=call.input_ids,
        output_ids=call.output_ids,
        output_logprobs=call.output_logprobs,
        versions=call.versions,
        finish_reason=call.finish_reason,
        sampling=Sampling(),
        context=call.context,
        diverged=call.diverged,
        discarded=call.discarded,
    )
