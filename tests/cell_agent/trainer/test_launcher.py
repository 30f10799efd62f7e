"""Starting, watching and ending real workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from services.cell_agent.trainer import child, launcher, protocol
from services.cell_agent.trainer.launcher import TrainerDied, TrainerStartError
from shared.config import CellsConfig
from tests.cell_agent.trainer import cells
from tests.cell_agent.trainer.forest import run_config, write_model

pytestmark = pytest.mark.megatron

AGENT = """
import asyncio, sys
from pathlib import Path
import msgspec
from services.cell_agent.trainer.launcher import launch
from shared.config import RunConfig

async def main():
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RunConfig)
    folder = Path(sys.argv[1]).parent
    handle = await launch(cell=0, config=config, run_dir=folder, log_path=folder / "trainer.log", device="cpu")
    print("PIDS", *handle.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie that nobody has waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_killed_worker_fails_the_waiting_calls_with_the_log(tmp_path: Path) -> None:
    config = run_config(write_model(tmp_path / "model"))
    async with cells.cell(config, tmp_path) as handle:
        await cells.load(handle, config)
        os.kill(handle.pids[0], signal.SIGSTOP)
        waiting = [asyncio.create_task(handle.call(protocol.EndBatch(id=0))) for _ in range(3)]
        await asyncio.sleep(0.1)
        os.kill(handle.pids[0], signal.SIGKILL)
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, TrainerDied)
            assert "exit codes (-9,)" in str(outcome)
        ended = await handle.exited
        assert ended.returncodes == (-9,)
        assert not ended.asked
        assert (await handle.close()) is ended


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_stopped_worker_is_noticed_killed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(launcher, "LISTEN_S", child.ALIVE_EVERY_S + 0.5)
    monkeypatch.setattr(launcher, "SILENT_TIMES", 2)
    config = run_config(write_model(tmp_path / "model"), CellsConfig(count=1, pipeline_parallel=2))
    async with cells.cell(config, tmp_path) as handle:
        await cells.load(handle, config)
        await asyncio.sleep(3 * launcher.LISTEN_S)
        assert not handle.exited.done(), "idle workers are heard of"
        os.kill(handle.pids[rank], signal.SIGSTOP)
        ended = await asyncio.wait_for(asyncio.shield(handle.exited), 20)
        assert ended.silent == (rank,)
        assert ended.silent_s >= 2 * launcher.LISTEN_S
        with pytest.raises(TrainerDied):
            await handle.call(protocol.EndBatch(id=0))


async def test_workers_do_not_outlive_a_killed_agent(tmp_path: Path) -> None:
    """Both ranks of a cell end when the agent process is killed."""
    config = run_config(write_model(tmp_path / "model"), CellsConfig(count=1, pipeline_parallel=2))
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(tmp_path / "config.json")], stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    line = await asyncio.to_thread(agent.stdout.readline)
    pids = [int(word) for word in line.split()[1:]]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    agent.kill()
    agent.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its agent"
        await asyncio.sleep(0.05)


async def test_workers_that_cannot_start_say_why(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = run_config(model, CellsConfig(count=1, tensor_parallel=1))
    (model / "config.json").write_text((model / "config.json").read_text().replace("Qwen3ForCausalLM", "Other"))
    with pytest.raises(TrainerStartError, match="architecture Other is not supported"):
        async with cells.cell(config, tmp_path):
            pass


async def test_workers_that_take_too_long_are_ended(tmp_path: Path) -> None:
    config = run_config(tmp_path / "model", CellsConfig(count=1, start_timeout_s=0.2))
    with pytest.raises(TrainerStartError, match="did not answer within 0 s"):
        async with cells.cell(config, tmp_path):
            pass
