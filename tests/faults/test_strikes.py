"""The short form of the fault matrix: one run, four strikes at steps where most can go wrong. All of it: chaos.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.chaos import run_cases
from tests.faults.matrix import Case

SHORT = (
    "adopting/source-engine/kill",
    "joined/source-agent/kill",
    "drained/core-trainer/kill",
    "cut/nats-server/kill",
)


@pytest.mark.e2e
@pytest.mark.timeout(900)
async def test_the_books_are_right_after_four_strikes(tmp_path: Path) -> None:
    result = await run_cases(tmp_path, [Case.of(name) for name in SHORT], steps=13)
    assert not result.problems, result
    assert [s.outcome for s in result.strikes] == ["struck"] * len(SHORT), result.strikes
