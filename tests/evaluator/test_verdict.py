"""How rewards are read, and which executions are scored, excluded or placeholders."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.evaluator.verdict import (
    Ledger,
    Reward,
    Unresolved,
    assessed,
    read_reward,
    try_again,
    without_artifact,
)
from shared.events import BlobRef, ExecutionFinished, ExecutionStarted, RunResumed
from tests.harness.test_attempts import dispatched


def finished(attempt: int = 1, ending: str = "completed", artifact: BlobRef | None = None) -> ExecutionFinished:
    return ExecutionFinished(
        execution="x",
        group="g1",
        task="/t",
        attempt=attempt,
        ending=ending,
        exit_code=0,
        artifact=artifact,
        seconds=1.0,
        cpu_seconds=1.0,
        detail="why",
    )


@given(st.floats(0.0, 1.0))
def test_every_score_in_range_is_read_exactly(score: float) -> None:
    assert read_reward(f" {score!r}\n".encode(), None) == Reward(score)
    assert read_reward(None, json.dumps({"reward": score, "other": 3}).encode()) == Reward(score)


@given(st.binary(max_size=40), st.none() | st.binary(max_size=40))
def test_whatever_was_written_gives_a_score_in_range_or_is_unresolved(text: bytes, document: bytes | None) -> None:
    for outcome in (read_reward(text, document), read_reward(None, document)):
        if isinstance(outcome, Reward):
            assert 0.0 <= outcome.score <= 1.0
            assert math.isfinite(outcome.score)
        else:
            assert outcome.reason


@pytest.mark.parametrize("text", ["", "one", "nan", "inf", "-0.1", "1.0001", "1 1", "0x1", "true"])
def test_what_is_no_score_is_unresolved_not_zero(text: str) -> None:
    assert isinstance(read_reward(text.encode(), None), Unresolved)


@pytest.mark.parametrize(
    "text", ["[1]", "1", '{"rewards": 1}', '{"reward": "1"}', '{"reward": true}', '{"reward": 2}', "{"]
)
def test_what_is_no_reward_document_is_unresolved(text: str) -> None:
    assert isinstance(read_reward(None, text.encode()), Unresolved)


def test_no_file_at_all_is_unresolved() -> None:
    assert isinstance(read_reward(None, None), Unresolved)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("failed_to_start", "placeholder"),
        ("overall_timeout", "excluded"),
        ("stopped", "excluded"),
        ("completed", "scored"),
        ("crashed", "scored"),
        ("harness_timeout", "scored"),
    ],
)
def test_an_execution_without_a_workspace_is_decided_by_its_ending(ending: str, status: str) -> None:
    found, score, detail = without_artifact(finished(ending=ending))
    assert (found, score) == (status, 0.0)
    assert "why" in detail


@given(st.integers(1, 10), st.integers(1, 10), st.floats(-10, 10))
def test_tries_end(tries: int, most: int, left: float) -> None:
    assert try_again(tries, most, left) == (tries < most and left > 0)


def test_an_assessment_is_tied_to_attempt_and_artifact() -> None:
    event = assessed(finished(3, artifact=BlobRef("ab", 2)), "scored", 0.5, 1, 2.0, "")
    assert (event.execution, event.attempt, event.artifact, event.branch) == ("x", 3, "ab", "main")


def test_the_ledger_knows_what_needs_no_assessment() -> None:
    ledger = Ledger()
    assert not ledger.needless(finished(1))
    ledger.handle(ExecutionStarted(execution="x", attempt=2, key_hash="0", harness="scout"), 0.0)
    assert ledger.needless(finished(1))
    assert not ledger.needless(finished(2))
    ledger.handle(assessed(finished(2), "scored", 1.0, 1, 0.0, ""), 0.0)
    assert ledger.needless(finished(2))


def test_a_resumed_run_starts_the_budget_anew_and_snapshots_hold_all() -> None:
    ledger, other = Ledger(), Ledger()
    ledger.handle(dispatched("x"), 5.0)
    ledger.handle(RunResumed(resumed_at=9.0), 9.0)
    assert ledger.dispatched_at == {"x": 9.0}
    other.restore(ledger.snapshot())
    assert other == ledger
