"""Forecasts end, whatever the present looks like and whatever plan they are asked about."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.forecast import Outlook, forecast

LIVES = st.floats(0.0, 50.0)
SECONDS = st.sampled_from([0.0, 0.5, 7.0])


@st.composite
def outlooks(draw: st.DrawFn) -> Outlook:
    executions = draw(st.integers(1, 3))
    cells = draw(st.integers(1, 4))
    per_cell = draw(st.integers(1, 6))
    group = st.lists(LIVES, min_size=executions, max_size=executions).map(tuple)
    begun = st.lists(LIVES, max_size=executions).map(tuple)  # empty: the group is ready
    return Outlook(
        batch=draw(st.integers(2, 6)),
        executions=executions,
        places=float(per_cell * (cells + draw(st.integers(0, 2)))),
        per_cell=float(per_cell),
        cells=float(cells),
        group_s=draw(st.sampled_from([0.0, 0.1, 3.0])),
        commit_s=draw(SECONDS),
        to_training_s=draw(SECONDS),
        pause_s=draw(SECONDS),
        join=1.0,
        groups=tuple(draw(st.lists(begun, max_size=8))),
        fresh=tuple(draw(st.lists(group, min_size=1, max_size=8))),
    )


@settings(max_examples=400, deadline=None)
@given(
    now=outlooks(),
    mu=st.integers(1, 4),
    phi=st.sampled_from([0.0, 0.25, 0.5, 1.5]),
    left=st.integers(1, 12),
    keep=st.integers(0, 3),
)
def test_every_schedule_comes_to_its_end(now: Outlook, mu: int, phi: float, left: int, keep: int) -> None:
    """One commit per step, each no earlier than the one before it."""
    commits = forecast(now, mu, phi, left, left, float(min(keep, now.cells)))
    assert len(commits) == left
    assert commits == sorted(commits)
    assert commits[0] >= 0.0
