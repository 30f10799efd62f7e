"""The supervisor of a run on one machine: what it starts again, and when it gives up. No engine, no trainer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy import local
from deploy.local import LocalRun
from shared.config import load, to_plain
from shared.events import RunStarted, ServiceDied
from tests.faults.live_run import ROOT

LIMIT_S = 60.0


@asynccontextmanager
async def supervised(folder: Path, *services: str) -> AsyncIterator[LocalRun]:
    """A run of which only these services are started."""
    config = load(ROOT / "examples" / "minirepo" / "run.yaml")
    async with LocalRun(config, "r1", folder) as run:
        assert run.bus is not None
        await run.bus.publish(
            RunStarted(
                run="r1",
                config=to_plain(config),
                run_dir=str(folder),
                train_tasks=("t",),
                eval_tasks={},
                started_at=time.time(),
            )
        )
        run.services = {name: service for name, service in run.services.items() if name in services}
        run.start_services()
        yield run


def pid(run: LocalRun, service: str) -> int:
    process = run.services[service].process
    return process.pid if process is not None and process.poll() is None else 0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.05)


async def test_server_and_services_that_die_together_come_back(tmp_path: Path) -> None:
    async with supervised(tmp_path, "scheduler", "trajectory") as run:
        assert run.server is not None
        before = {name: pid(run, name) for name in run.services} | {"nats": run.server.process.pid}
        for victim in before.values():
            os.kill(victim, signal.SIGKILL)
        await until(lambda: run.server.process.poll() is None and run.server.process.pid != before["nats"])  # type: ignore[union-attr]
        await until(lambda: all(pid(run, name) not in (0, before[name]) for name in run.services))
        assert run.bus is not None
        end = await run.bus.last_sequence()
        died = [m.event for m in [m async for m in run.bus.read_until(end)] if isinstance(m.event, ServiceDied)]
        assert {e.service for e in died} == {"scheduler", "trajectory"}  # type: ignore[union-attr]
        assert run.failed is None


async def test_a_service_that_keeps_dying_ends_the_run_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RESTARTS", 1)
    async with supervised(tmp_path, "scheduler") as run:
        for _ in range(2):
            await until(lambda: pid(run, "scheduler"))
            os.kill(pid(run, "scheduler"), signal.SIGKILL)
            died = len(run.services["scheduler"].deaths)
            await until(lambda died=died: len(run.services["scheduler"].deaths) > died)
        await until(lambda: run.failed)
        assert run.failed is not None
        assert "scheduler died 2 times" in run.failed


async def test_a_server_that_cannot_come_back_is_told(tmp_path: Path) -> None:
    async with supervised(tmp_path) as run:
        assert run.server is not None
        (tmp_path / "nats" / "nats.conf").unlink()
        (tmp_path / "nats" / "nats.conf").mkdir()  # where the server's configuration would be written
        os.kill(run.server.process.pid, signal.SIGKILL)
        await until(lambda: run.failed)
        assert run.failed is not None
        assert "nats-server" in run.failed
