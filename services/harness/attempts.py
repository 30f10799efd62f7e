"""The life of an execution at the harness, without any I/O.

Owns the transition table of one attempt, its time limits, and what the stream says about all executions.

Invariant: an attempt follows TRANSITIONS; its number is higher than that of every earlier attempt of the execution, and
an execution that is finished is never started again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from shared.actor import Effect
from shared.events import (
    Event,
    ExecutionDispatched,
    ExecutionFinished,
    ExecutionStarted,
    ProxyReady,
    RunResumed,
    StopRequested,
)

# ---------------------------------------------------------------------------------------------------- one attempt


class State(Enum):
    PLACED = "placed"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"  # the process ended or is being ended; the workspace is not yet preserved
    PRESERVED = "preserved"  # the artifact is durable, or there is none; the outcome is not yet published
    FINISHED = "finished"


class Step(Enum):
    BEGIN = "begin"
    START_FAILED = "start_failed"
    STARTED = "started"
    GAVE_UP = "gave_up"  # nothing ran, nothing to preserve
    LIMIT = "limit"
    EXITED = "exited"
    PRESERVE = "preserve"
    PUBLISH = "publish"


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.PLACED, Step.BEGIN): State.STARTING,
    (State.PLACED, Step.GAVE_UP): State.PRESERVED,
    (State.STARTING, Step.START_FAILED): State.STARTING,
    (State.STARTING, Step.STARTED): State.RUNNING,
    (State.STARTING, Step.GAVE_UP): State.PRESERVED,
    (State.RUNNING, Step.LIMIT): State.STOPPING,
    (State.RUNNING, Step.EXITED): State.STOPPING,
    (State.STOPPING, Step.PRESERVE): State.PRESERVED,
    (State.PRESERVED, Step.PUBLISH): State.FINISHED,
}


class IllegalStep(RuntimeError):
    """The shell did something in the wrong order."""


@dataclass(frozen=True)
class Attempt:
    """One attempt. `ending` is set once known; `failures` are the reasons of failed starts."""

    execution: str
    number: int
    state: State = State.PLACED
    ending: str = ""
    failures: tuple[str, ...] = ()

    def step(self, step: Step, *, ending: str = "", failure: str = "") -> Attempt:
        """The attempt after `step`. Raises IllegalStep."""
        state = TRANSITIONS.get((self.state, step))
        if state is None:
            raise IllegalStep(f"{self.execution} attempt {self.number}: {step.value} in state {self.state.value}")
        failures = (*self.failures, failure) if failure else self.failures
        return replace(self, state=state, ending=ending or self.ending, failures=failures)


@dataclass(frozen=True)
class TimeLimit:
    """The harness may run for `seconds` more (<= 0: not at all); when they are over, it ends as `ending`."""

    seconds: float
    ending: str


def time_limit(harness_s: float, task_s: float | None, budget_s: float, dispatched_at: float, now: float) -> TimeLimit:
    """The smallest of the run's harness limit, the task's own, and what is left of the execution's overall budget."""
    own = harness_s if task_s is None else min(harness_s, task_s)
    left = dispatched_at + budget_s - now
    return TimeLimit(own, "harness_timeout") if own <= left else TimeLimit(left, "overall_timeout")


def ending_of(code: int | None, stopped: bool, limit: TimeLimit) -> str:
    """How an attempt that ran ended."""
    if stopped:
        return limit.ending
    return "completed" if code == 0 else "crashed"


# ------------------------------------------------------------------------------------------------ all executions


class _Snapshot(msgspec.Struct):
    proxy: ProxyReady | None
    stopping: bool
    dispatched_at: dict[str, float]
    attempts: dict[str, int]
    finished: set[str]


@dataclass
class Ledger:
    """What the stream says: a core without effects (architecture.md). `proxy` is None until one of this process
    generation is ready."""

    proxy: ProxyReady | None = None
    stopping: bool = False
    dispatched_at: dict[str, float] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case ProxyReady():
                self.proxy = event
            case StopRequested():
                self.stopping = True
            case RunResumed():  # all processes are new; the time the run stood still is nobody's
                self.proxy, self.stopping = None, False
                self.dispatched_at = dict.fromkeys(self.dispatched_at, now)
            case ExecutionDispatched():
                self.dispatched_at[event.execution] = now
            case ExecutionStarted():
                self.attempts[event.execution] = max(event.attempt, self.attempts.get(event.execution, 0))
            case ExecutionFinished():
                self.finished.add(event.execution)
                self.dispatched_at.pop(event.execution, None)
                self.attempts.pop(event.execution, None)
        return []

    def next_attempt(self, execution: str, deliveries: int) -> int:
        return max(deliveries, self.attempts.get(execution, 0) + 1)

    def superseded(self, execution: str, attempt: int) -> bool:
        """Whether someone else took the execution over, or finished it."""
        return execution in self.finished or self.attempts.get(execution, 0) > attempt

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(
            _Snapshot(self.proxy, self.stopping, self.dispatched_at, self.attempts, self.finished)
        )

    def restore(self, data: bytes) -> None:
        saved = msgspec.msgpack.decode(data, type=_Snapshot)
        self.proxy, self.stopping, self.finished = saved.proxy, saved.stopping, saved.finished
        self.dispatched_at, self.attempts = saved.dispatched_at, saved.attempts
