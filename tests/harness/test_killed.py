"""kill -9 of the services in the middle of their work: nothing lost, nothing doubled, no process left."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from shared.config import AssessmentConfig
from shared.events import ExecutionAssessed, ExecutionFinished, ExecutionStarted
from tests.harness.support import Run, ScriptedModel, config, processes_with, shell, write_task
from tests.sandboxes import needs_sandbox

pytestmark = needs_sandbox

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib, sys
from shared.runtime import run_service
name, url, run = sys.argv[1:]
service = importlib.import_module(f"services.{name}.service")
service.ACK_WAIT_S = 2.0  # the real one is half a minute
sys.exit(run_service(name, url, run, service.serve, {}))
"""


async def process(run: Run, name: str) -> asyncio.subprocess.Process:
    """A service as a process of its own, on uvloop, as `gyre serve` starts it."""
    return await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, name, run.url, run.run, cwd=ROOT)


async def test_killed_services_are_replaced_without_loss_or_double(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    mark = f"3144.{time.time_ns() % 1_000_000}"
    model = ScriptedModel(tmp_path, [{"content": "done"}])
    await model.start()
    task = write_task(tmp_path / "task", f"[ -e /tests/gate ] || sleep {mark}\necho 1 > /logs/verifier/reward.txt\n")
    gate, start = task / "tests" / "gate", task / "environment" / "workspace" / "gate"
    settings = config(shell(f"[ -e gate ] || sleep {mark}"), assessment=AssessmentConfig(timeout_s=30.0, workers=3))
    run = await Run(nats_url, fresh_run, tmp_path / "run", settings).open()
    await run.proxy_ready(model.socket)
    for number in range(3):
        await run.place(f"g1x{number:02d}", task)
    for name, kind, opener in (("harness", ExecutionFinished, start), ("evaluator", ExecutionAssessed, gate)):
        first = await process(run, name)
        async with asyncio.timeout(30):
            while len([line for line in processes_with(mark) if line.startswith("sleep")]) < 3:
                await asyncio.sleep(0.05)
        first.kill()
        await first.wait()
        async with asyncio.timeout(5):
            while processes_with(mark):
                await asyncio.sleep(0.02)
        opener.write_text("")
        second = await process(run, name)
        await run.expect(kind, 3)
        second.terminate()
        assert await asyncio.wait_for(second.wait(), 10) == 0
    events = await run.events()
    finished = [e for e in events if isinstance(e, ExecutionFinished)]
    assessed = [e for e in events if isinstance(e, ExecutionAssessed)]
    assert sorted(e.execution for e in finished) == sorted(e.execution for e in assessed)
    assert len({e.execution for e in finished}) == len(finished) == 3
    assert all(e.attempt > 1 and e.ending == "completed" for e in finished)
    assert {(e.status, e.score) for e in assessed} == {("scored", 1.0)}
    assert not [p for p in (run.folder / "work").iterdir() if p.name.startswith(("g1x", "score-"))]
    await run.close()


async def test_an_attempt_that_another_process_took_over_ends_without_a_result(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    mark = f"3145.{time.time_ns() % 1_000_000}"
    model = ScriptedModel(tmp_path, [{"content": "done"}])
    await model.start()
    run = await Run(nats_url, fresh_run, tmp_path / "run", config(shell(f"sleep {mark}"))).open()
    await run.proxy_ready(model.socket)
    async with run.service("harness") as ctx:
        await run.place("g1x00", write_task(tmp_path / "task"))
        while not [line for line in processes_with(mark) if line.startswith("sleep")]:
            await asyncio.sleep(0.05)
        await ctx.bus.publish(ExecutionStarted(execution="g1x00", attempt=5, key_hash="0" * 64, harness="shell"))
        async with asyncio.timeout(5):
            while processes_with(mark):
                await asyncio.sleep(0.05)
    assert not [e for e in await run.events() if isinstance(e, ExecutionFinished)]
    await run.close()
