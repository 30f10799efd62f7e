"""A whole run with two cells and a standalone engine, in which live calls keep their KV when new weights come, and
what receives the engine's weights dies once."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import events as ev
from shared.events import Event
from tests.faults.live_run import books_balance, live_run, trained_once

STANDALONE = 2


def finished(event: Event) -> bool:
    return isinstance(event, ev.RunPhaseChanged) and event.phase == "finished"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["elastic", "colocate"])
async def test_two_cells_and_a_standalone_engine(tmp_path: Path, mode: str) -> None:
    """In colocate both cells leave together, as soon as the standalone engine can hold what is left."""
    keys = {"scheduler.mode": mode, "cells.standalone": 1, "cells.kv_stale": "keep", "training.steps": 5}
    async with live_run(tmp_path, **keys) as run:
        await run.until(lambda e: isinstance(e, ev.CellRoleOrdered), 400.0)
        assert len(run.pids("services.cell_agent.receiver", f"--cell {STANDALONE}")) == 1
        assert len(run.pids("trainer.worker")) == 2
        assert run.pids("trainer.worker", f"--cell {STANDALONE}") == []
        run.kill("services.cell_agent.receiver")
        await run.until(lambda e: isinstance(e, ev.CellFailed) and (e.cell, e.part) == (STANDALONE, "receiver"), 60.0)
        await run.until(lambda e: isinstance(e, ev.CellEngineReady) and e.cell == STANDALONE, 400.0)
        await run.until(finished, 400.0)
        seen = list(run.seen)
        summary = await run.end()
    books_balance(summary, steps=5, batch=12, evaluated=8)
    trained_once(seen)
    assert summary["tokens"]["generated"] == summary["tokens"]["recorded"] > 0
    roles = {e.role for e in seen if isinstance(e, ev.CellRoleChanged) and e.cell == STANDALONE}
    assert roles == {"rollout"}
    assert {e.cell for e in seen if isinstance(e, ev.CellRoleOrdered)} <= {0, 1}
    published = [e.version for e in seen if isinstance(e, ev.BurstEnded)]
    taken = [e.version for e in seen if isinstance(e, ev.CellRefitted | ev.CellEngineReady) and e.cell == STANDALONE]
    assert set(taken) >= set(published[1:])  # the first burst may end while the receiver starts again
    assert taken[-1] == published[-1]
    calls = [e for e in seen if isinstance(e, ev.ModelCallRecorded)]
    assert any(e.cell == STANDALONE for e in calls)
    engines = {e.engine for e in seen if isinstance(e, ev.EngineCounted) and e.cell == STANDALONE}
    assert len(engines) == 1  # it went on serving
    spans = max(len(e.versions) for e in calls)
    moved = [e.to_cell for e in seen if isinstance(e, ev.ExecutionMoved)]
    print(f"{len(calls)} calls, most versions in one: {spans}; moved to {moved}")
