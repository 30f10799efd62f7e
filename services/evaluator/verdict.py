"""What a finished execution is worth, decided without any I/O.

Owns the rules: how a reward is read, what is scored, excluded or a placeholder, and when an unresolved assessment is
tried again.

Invariant: an evaluator failure never becomes a zero. A zero comes from a reward that the tests wrote, from an execution
that never ran (placeholder), or from a workspace that its own harness made too large to be preserved.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import msgspec

from shared.actor import Effect
from shared.events import (
    Event,
    ExecutionAssessed,
    ExecutionDispatched,
    ExecutionFinished,
    ExecutionStarted,
    RunResumed,
)


@dataclass(frozen=True)
class Reward:
    """The tests ran and left a score in 0..1."""

    score: float
    detail: str = ""


@dataclass(frozen=True)
class Unresolved:
    """There is no score, and that says nothing about the workspace."""

    reason: str


Outcome = Reward | Unresolved


def read_reward(text: bytes | None, document: bytes | None) -> Outcome:
    """The score from the contents of reward.txt (a number) or, without it, reward.json ({"reward": number})."""
    if text is not None:
        return _score(text.decode("utf-8", "replace").strip(), "reward.txt")
    if document is None:
        return Unresolved("the tests wrote neither reward.txt nor reward.json")
    try:
        value = json.loads(document)
    except (ValueError, RecursionError) as error:
        return Unresolved(f"reward.json is not JSON: {error}")
    if not isinstance(value, dict) or "reward" not in value:
        return Unresolved('reward.json has no key "reward"')
    if isinstance(value["reward"], bool) or not isinstance(value["reward"], int | float):
        return Unresolved(f"reward.json: the reward is not a number: {value['reward']!r:.80}")
    return _score(str(value["reward"]), "reward.json")


def _score(text: str, name: str) -> Outcome:
    try:
        score = float(text)
    except ValueError:
        return Unresolved(f"{name} holds no number: {text[:80]!r}")
    if not math.isfinite(score) or not 0.0 <= score <= 1.0:
        return Unresolved(f"{name} holds {text[:80]}, which is not in 0..1")
    return Reward(score)


def without_artifact(finished: ExecutionFinished) -> tuple[str, float, str]:
    """(status, score, detail) of an execution that left no workspace."""
    if finished.ending == "failed_to_start":
        return "placeholder", 0.0, f"never ran: {finished.detail}"
    if finished.ending in ("overall_timeout", "stopped"):
        return "excluded", 0.0, f"nothing assessable ({finished.ending}): {finished.detail}"
    return "scored", 0.0, f"left a workspace that could not be preserved: {finished.detail}"


def try_again(tries: int, most: int, budget_left_s: float) -> bool:
    """Whether an assessment that is unresolved after `tries` is tried once more."""
    return tries < most and budget_left_s > 0.0


def assessed(
    finished: ExecutionFinished, status: str, score: float, tries: int, seconds: float, detail: str
) -> ExecutionAssessed:
    return ExecutionAssessed(
        execution=finished.execution,
        group=finished.group,
        attempt=finished.attempt,
        artifact=finished.artifact.digest if finished.artifact else "",
        branch="main",
        status=status,
        score=score,
        tries=tries,
        seconds=seconds,
        detail=detail,
    )


class _Snapshot(msgspec.Struct):
    assessed: set[str]
    dispatched_at: dict[str, float]
    attempts: dict[str, int]


@dataclass
class Ledger:
    """What the stream says: a core without effects (architecture.md)."""

    assessed: set[str] = field(default_factory=set)
    dispatched_at: dict[str, float] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case ExecutionDispatched():
                self.dispatched_at[event.execution] = now
            case RunResumed():  # the time the run stood still is nobody's
                self.dispatched_at = dict.fromkeys(self.dispatched_at, now)
            case ExecutionStarted():
                self.attempts[event.execution] = max(event.attempt, self.attempts.get(event.execution, 0))
            case ExecutionAssessed():
                self.assessed.add(event.execution)
                self.dispatched_at.pop(event.execution, None)
                self.attempts.pop(event.execution, None)
        return []

    def needless(self, finished: ExecutionFinished) -> bool:
        """Whether the execution is assessed already, or a later attempt of it is under way and will finish itself."""
        return finished.execution in self.assessed or self.attempts.get(finished.execution, 0) > finished.attempt

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(_Snapshot(self.assessed, self.dispatched_at, self.attempts))

    def restore(self, data: bytes) -> None:
        saved = msgspec.msgpack.decode(data, type=_Snapshot)
        self.assessed, self.dispatched_at, self.attempts = saved.assessed, saved.dispatched_at, saved.attempts
