"""A satellite that pulls weights from a core that is stopped: it neither hangs nor keeps the reason to itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from services.cell_agent import workers
from services.cell_agent.trainer.launcher import TrainerFailed
from services.cell_agent.workers import Workers
from tests.cell_agent.trainer import cells
from tests.cell_agent.trainer.forest import run_config, write_model

pytestmark = pytest.mark.megatron
LIMIT_S = 4.0


async def test_a_pull_from_a_stopped_core_ends_in_time_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PULL_S", LIMIT_S)
    config = run_config(write_model(tmp_path / "model"))
    async with cells.cell(config, tmp_path, 0) as core, cells.cell(config, tmp_path, 1) as satellite:
        await cells.load(core, config)
        weights = await Workers(core, 0, "first").snapshot(0)
        os.kill(core.pids[0], signal.SIGSTOP)
        while (
            status := psutil.Process(core.pids[0]).status()
        ) != psutil.STATUS_STOPPED:  # on a busy machine it takes time
            assert status != psutil.STATUS_ZOMBIE
            await asyncio.sleep(0.01)
        started = time.monotonic()
        with pytest.raises(TrainerFailed, match=f"{weights.session}.*hangs") as failure:
            await Workers(satellite, 1, "second").pull(weights, tuple, lambda _: True, load=True)
        assert failure.value.fatal, "its transfer may be blocked for minutes: the satellite's workers start again"
        assert time.monotonic() - started < LIMIT_S + 3
        os.kill(core.pids[0], signal.SIGKILL)
