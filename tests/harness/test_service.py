"""The harness service on a real stream, with real sandboxes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from shared import workspace
from shared.blobs import BlobStore
from shared.config import ExecutionConfig
from shared.events import ExecutionFinished, ExecutionPlaced, ExecutionStarted, Sampling, StopRequested
from tests.harness.support import Run, ScriptedModel, config, processes_with, shell, write_task
from tests.sandboxes import needs_sandbox

pytestmark = needs_sandbox


def unpacked(run: Run, finished: ExecutionFinished, folder: Path) -> Path:
    assert finished.artifact is not None
    workspace.unpack(BlobStore(run.folder / "blobs").get(finished.artifact), folder)
    return folder


async def started_run(url: str, name: str, tmp_path: Path, settings) -> tuple[Run, ScriptedModel, asyncio.Server]:
    model = ScriptedModel(tmp_path, [{"content": "done"}])
    server = await model.start()
    run = await Run(url, name, tmp_path / "run", settings).open()
    await run.proxy_ready(model.socket)
    return run, model, server


async def test_an_execution_runs_and_its_workspace_is_preserved(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    settings = config(shell('echo hello > hello.txt; echo "$0" > instruction; ls -a / > seen; exit 0'))
    run, _, _ = await started_run(nats_url, fresh_run, tmp_path, settings)
    async with run.service("harness"):
        await run.place("g1x00", write_task(tmp_path / "task"))
        [finished] = await run.expect(ExecutionFinished)
    assert (finished.ending, finished.exit_code, finished.attempt) == ("completed", 0, 1)
    assert 0 < finished.cpu_seconds < 1
    left = unpacked(run, finished, tmp_path / "left")
    assert (left / "hello.txt").read_text() == "hello\n"
    assert (left / "instruction").read_text() == "Write hello into hello.txt.\n"
    assert (left / "README.md").read_text() == "start\n"
    assert "tests" not in (left / "seen").read_text()
    [started] = await run.expect(ExecutionStarted)
    assert len(started.key_hash) == 64
    assert not list((run.folder / "work").glob("g1x00*"))
    await run.close()


async def test_the_hidden_tests_are_nowhere_in_the_sandbox(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    script = "grep -rs hidden-answer / --exclude-dir=proc --exclude-dir=usr --exclude-dir=sys > found; ls /tests"
    run, _, _ = await started_run(nats_url, fresh_run, tmp_path, config(shell(script)))
    async with run.service("harness"):
        await run.place("g1x00", write_task(tmp_path / "task"))
        [finished] = await run.expect(ExecutionFinished)
    assert finished.ending == "crashed"  # ls failed
    assert (unpacked(run, finished, tmp_path / "left") / "found").read_text() == ""
    await run.close()


async def test_a_time_limit_ends_the_harness_and_everything_it_started(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    mark = f"3137.{time.time_ns() % 1_000_000}"
    script = f"trap 'echo asked > asked' TERM; (setsid sleep {mark} &) ; echo early > early; sleep {mark}; sleep {mark}"
    run, _, _ = await started_run(nats_url, fresh_run, tmp_path, config(shell(script)))
    async with run.service("harness"):
        begun = time.monotonic()
        await run.place("g1x00", write_task(tmp_path / "task", toml="[agent]\ntimeout_sec = 1.0\n"))
        [finished] = await run.expect(ExecutionFinished)
        assert time.monotonic() - begun < 8
        assert processes_with(mark) == []
    assert finished.ending == "harness_timeout"
    left = unpacked(run, finished, tmp_path / "left")
    assert (left / "early").exists()
    assert (left / "asked").read_text() == "asked\n"
    await run.close()


async def test_the_overall_budget_ends_it_as_overall_timeout(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    limits = ExecutionConfig(harness_time_limit_s=60.0, overall_budget_s=1.5)
    run, _, _ = await started_run(nats_url, fresh_run, tmp_path, config(shell("exec sleep 50"), limits))
    async with run.service("harness"):
        await run.place("g1x00", write_task(tmp_path / "task"))
        [finished] = await run.expect(ExecutionFinished)
    assert finished.ending == "overall_timeout"
    assert finished.artifact is not None
    await run.close()


async def test_without_a_proxy_the_budget_runs_out_before_the_start(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    limits = ExecutionConfig(harness_time_limit_s=60.0, overall_budget_s=1.0)
    run = await Run(nats_url, fresh_run, tmp_path / "run", config(shell("true"), limits)).open()
    async with run.service("harness"):
        await run.place("g1x00", write_task(tmp_path / "task"))
        [finished] = await run.expect(ExecutionFinished)
    assert (finished.ending, finished.artifact) == ("overall_timeout", None)
    assert not [e for e in await run.events() if isinstance(e, ExecutionStarted)]
    await run.close()


async def test_a_broken_task_fails_to_start_with_its_reason(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    run, _, _ = await started_run(nats_url, fresh_run, tmp_path, config(shell("true")))
    task = write_task(tmp_path / "task")
    (task / "instruction.md").unlink()
    async with run.service("harness"):
        await run.place("g1x00", task)
        [finished] = await run.expect(ExecutionFinished)
    assert (finished.ending, finished.artifact) == ("failed_to_start", None)
    assert "instruction.md is missing" in finished.detail
    await run.close()


async def test_a_start_that_fails_is_tried_again_and_then_given_up(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    settings = config(shell("true"))
    run, _, server = await started_run(nats_url, fresh_run, tmp_path, settings)
    server.close()
    (tmp_path / "model-api.sock").unlink(missing_ok=True)
    async with run.service("harness"):
        await run.place("g1x00", write_task(tmp_path / "task"))
        [finished] = await run.expect(ExecutionFinished)
    assert finished.ending == "failed_to_start"
    assert "start 1:" in finished.detail
    assert "start 2:" in finished.detail
    await run.close()


async def test_stopping_gives_the_work_back_and_leaves_no_process(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    mark = f"3138.{time.time_ns() % 1_000_000}"
    script = f"trap '' TERM; if [ -e /app/README.md ]; then sleep {mark}; fi"
    run, _, _ = await started_run(nats_url, fresh_run, tmp_path, config(shell(script)))
    task = write_task(tmp_path / "task")
    async with run.service("harness"):
        for number in range(3):
            await run.place(f"g1x{number:02d}", task)
        await run.expect(ExecutionStarted, 3)
        async with asyncio.timeout(10):
            while len(processes_with(mark)) < 3:
                await asyncio.sleep(0.05)
        stopping = time.monotonic()
    assert time.monotonic() - stopping < 5
    assert processes_with(mark) == []
    assert not [e for e in await run.events() if isinstance(e, ExecutionFinished)]
    (task / "environment" / "workspace" / "README.md").rename(task / "environment" / "workspace" / "OTHER.md")
    async with run.service("harness"):
        finished = await run.expect(ExecutionFinished, 3)
    assert all(f.attempt > 1 for f in finished)
    assert {f.ending for f in finished} == {"completed"}
    await run.close()


async def test_nothing_new_starts_after_a_stop_request(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    run, _, _ = await started_run(nats_url, fresh_run, tmp_path, config(shell("true")))
    await run.control.publish(StopRequested(reason="test"))
    async with run.service("harness"):
        await run.place("g1x00", write_task(tmp_path / "task"))
        await asyncio.sleep(1.0)
    assert not [e for e in await run.events() if isinstance(e, ExecutionStarted)]
    await run.close()


async def test_a_finished_execution_is_not_run_again(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    run, _, _ = await started_run(nats_url, fresh_run, tmp_path, config(shell("true")))
    task = write_task(tmp_path / "task")
    async with run.service("harness"):
        await run.place("g1x00", task)
        await run.expect(ExecutionFinished)
        again = ExecutionPlaced(
            execution="g1x00", group="g1", task=str(task), cell=1, sampling=Sampling(), policy_version=0
        )
        await run.scheduler.publish(again)
        await asyncio.sleep(0.7)
    assert len([e for e in await run.events() if isinstance(e, ExecutionStarted)]) == 1
    assert len([e for e in await run.events() if isinstance(e, ExecutionFinished)]) == 1
    await run.close()


async def test_what_a_harness_writes_is_kept_within_bounds(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    script = "echo first words; head -c 3000000 /dev/zero | tr '\\0' x; echo last words >&2"
    run, _, _ = await started_run(nats_url, fresh_run, tmp_path, config(shell(script)))
    async with run.service("harness"):
        await run.place("g1x00", write_task(tmp_path / "task"))
        await run.expect(ExecutionFinished)
    log = (run.folder / "logs" / "executions" / "g1x00.log").read_text()
    assert "first words" in log
    assert "last words" in log
    assert "bytes left out" in log
    assert len(log) < 140_000
    await run.close()
