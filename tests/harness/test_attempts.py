"""The life of an attempt, its time limits, and what the ledger knows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.harness.attempts import (
    TRANSITIONS,
    Attempt,
    IllegalStep,
    Ledger,
    State,
    Step,
    TimeLimit,
    ending_of,
    time_limit,
)
from shared.events import (
    ExecutionDispatched,
    ExecutionFinished,
    ExecutionStarted,
    ProxyReady,
    RunResumed,
    StopRequested,
)

PROXY = ProxyReady(proxy="proxy", url="http://127.0.0.1:1", socket="/run/p.sock")


def dispatched(execution: str) -> ExecutionDispatched:
    return ExecutionDispatched(execution=execution, group="g1", index=0, task="/t", purpose="train", policy_version=0)


def started(execution: str, attempt: int) -> ExecutionStarted:
    return ExecutionStarted(execution=execution, attempt=attempt, key_hash="0" * 64, harness="scout")


def finished(execution: str, attempt: int) -> ExecutionFinished:
    return ExecutionFinished(
        execution=execution,
        group="g1",
        task="/t",
        attempt=attempt,
        ending="completed",
        exit_code=0,
        artifact=None,
        seconds=1.0,
        cpu_seconds=1.0,
    )


@given(st.lists(st.sampled_from(Step), max_size=12))
def test_an_attempt_only_moves_along_the_table_and_always_forward(steps: list[Step]) -> None:
    attempt, order = Attempt("x", 1), list(State)
    for step in steps:
        allowed = (attempt.state, step) in TRANSITIONS
        try:
            after = attempt.step(step)
        except IllegalStep:
            assert not allowed
            continue
        assert allowed
        assert order.index(after.state) >= order.index(attempt.state)
        attempt = after


def test_every_state_but_the_last_leads_on_and_the_last_is_reachable() -> None:
    reached, frontier = {State.PLACED}, [State.PLACED]
    while frontier:
        state = frontier.pop()
        following = {to for (origin, _), to in TRANSITIONS.items() if origin is state}
        assert following or state is State.FINISHED
        frontier += following - reached
        reached |= following
    assert reached == set(State)


def test_failures_to_start_are_remembered() -> None:
    attempt = Attempt("x", 1).step(Step.BEGIN)
    attempt = attempt.step(Step.START_FAILED, failure="one").step(Step.START_FAILED, failure="two")
    assert attempt.step(Step.GAVE_UP, ending="failed_to_start").failures == ("one", "two")


TIMES = st.floats(0.1, 1e5)


@given(TIMES, st.none() | TIMES, TIMES, TIMES)
def test_the_smallest_limit_holds_and_names_the_ending(
    own: float, task: float | None, budget: float, now: float
) -> None:
    limit = time_limit(own, task, budget, dispatched_at=0.0, now=now)
    assert limit.seconds == min(own, task if task is not None else own, 0.0 + budget - now)
    if limit.ending == "overall_timeout":
        assert budget - now < own
    else:
        assert limit.seconds > 0


@pytest.mark.parametrize(
    ("code", "stopped", "ending"),
    [(0, False, "completed"), (1, False, "crashed"), (None, False, "crashed"), (None, True, "harness_timeout")],
)
def test_how_it_ended(code: int | None, stopped: bool, ending: str) -> None:
    assert ending_of(code, stopped, TimeLimit(1.0, "harness_timeout")) == ending


def test_attempt_numbers_rise_whatever_the_delivery_count_says() -> None:
    ledger = Ledger()
    assert ledger.next_attempt("x", 1) == 1
    ledger.handle(started("x", 3), 0.0)
    assert ledger.next_attempt("x", 1) == 4
    assert ledger.next_attempt("x", 7) == 7
    ledger.handle(started("x", 2), 0.0)
    assert ledger.next_attempt("x", 1) == 4


def test_a_later_attempt_or_an_end_supersedes() -> None:
    ledger = Ledger()
    ledger.handle(started("x", 1), 0.0)
    assert not ledger.superseded("x", 1)
    ledger.handle(started("x", 2), 0.0)
    assert ledger.superseded("x", 1)
    ledger.handle(finished("x", 2), 0.0)
    assert ledger.superseded("x", 2)


def test_a_resumed_run_waits_for_a_new_proxy_and_starts_the_budget_anew() -> None:
    ledger = Ledger()
    for event, now in ((dispatched("x"), 10.0), (PROXY, 11.0), (StopRequested(reason="ctrl-c"), 12.0)):
        ledger.handle(event, now)
    assert ledger.stopping
    ledger.handle(RunResumed(resumed_at=500.0), 500.0)
    assert (ledger.proxy, ledger.stopping, ledger.dispatched_at) == (None, False, {"x": 500.0})


def test_a_snapshot_holds_the_whole_ledger() -> None:
    ledger, other = Ledger(), Ledger()
    for event in (dispatched("x"), PROXY, started("x", 2), dispatched("y"), finished("y", 1)):
        ledger.handle(event, 1.0)
    other.restore(ledger.snapshot())
    assert other == ledger
