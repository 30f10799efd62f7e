"""Plans that more than one test draws."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.scheduler.world import Plan


def lookahead_plans(most_steps: int) -> st.SearchStrategy[Plan]:
    """Small runs of lookahead with deaths, stops and failures."""
    return st.builds(
        Plan,
        seed=st.integers(0, 10**6),
        mode=st.just("lookahead"),
        cells=st.integers(2, 5),
        capacity=st.integers(1, 12),
        mu=st.integers(1, 4),
        phi=st.sampled_from([0.0, 0.5, 1.5]),
        groups=st.integers(1, 5),
        executions=st.integers(1, 4),
        steps=st.integers(0, most_steps),
        train_s=st.sampled_from([0.2, 20.0]),
        deaths_per_hour=st.sampled_from([0.0, 20.0, 120.0]),
        stops=st.integers(0, 2),
        failures=st.sampled_from([0.0, 0.1, 1.0]),
    )
