"""Real harness programs, unmodified, in real sandboxes against a scripted model API."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest

from services.harness import setup
from shared import workspace
from shared.blobs import BlobStore
from shared.config import ExecutionConfig, HarnessConfig
from shared.events import ExecutionAssessed, ExecutionFinished, ExecutionStarted
from tests.harness.support import Run, ScriptedModel, config, write_task
from tests.sandboxes import needs_sandbox

pytestmark = needs_sandbox


def call(command: str) -> dict:
    """An assistant message that runs `command` with the tool that both programs call bash."""
    arguments = json.dumps({"command": command})
    function = {"name": "bash", "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


async def trained(url: str, name: str, tmp_path: Path, harness: HarnessConfig, replies: list[dict], **limits: float):
    """One execution from its placement to its assessment; returns (model, events by kind)."""
    model = ScriptedModel(tmp_path, replies)
    await model.start()
    settings = config(harness, ExecutionConfig(harness_time_limit_s=90.0, **limits))
    run = await Run(url, name, tmp_path / "run", settings).open()
    await run.proxy_ready(model.socket)
    async with run.service("harness"), run.service("evaluator"):
        await run.place("g1x00", write_task(tmp_path / "task"))
        [started] = await run.expect(ExecutionStarted, 1, 60)
        [finished] = await run.expect(ExecutionFinished, 1, 100)
        [assessed] = await run.expect(ExecutionAssessed, 1, 60)
    await run.close()
    return model, started, finished, assessed


async def test_scout_works_on_a_task(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    replies = [call("echo hello > hello.txt"), call("cat hello.txt"), {"content": "done"}]
    model, started, finished, assessed = await trained(
        nats_url, fresh_run, tmp_path, HarnessConfig(name="scout", extra_args=("--no-subagents",)), replies
    )
    assert finished.ending == "completed"
    assert (assessed.status, assessed.score) == ("scored", 1.0)
    assert len(model.requests) == 3
    headers, body = model.requests[0]
    key = headers["authorization"].removeprefix("Bearer ")
    assert hashlib.blake2b(key.encode(), digest_size=32).hexdigest() == started.key_hash
    assert body["model"] == "gyre-policy"
    assert "Write hello into hello.txt." in json.dumps(body["messages"])
    assert "hello" in json.dumps(model.requests[2][1]["messages"][-1])


async def test_scout_without_a_proxy_crashes_but_its_workspace_is_scored(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    harness = HarnessConfig(name="scout", extra_args=("--max-retries", "0"))
    model = ScriptedModel(tmp_path, [{"content": "done"}])
    server = await model.start()
    run = await Run(nats_url, fresh_run, tmp_path / "run", config(harness)).open()
    await run.proxy_ready(model.socket)
    server.close()  # the socket's file stays, nobody listens
    async with run.service("harness"), run.service("evaluator"):
        await run.place("g1x00", write_task(tmp_path / "task"))
        [finished] = await run.expect(ExecutionFinished)
        [assessed] = await run.expect(ExecutionAssessed)
    assert (finished.ending, finished.exit_code) == ("crashed", 3)
    assert (assessed.status, assessed.score) == ("scored", 0.25)
    await run.close()


async def test_a_proxy_that_comes_back_is_reached_by_a_running_execution(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    first = ScriptedModel(tmp_path, [call("echo 1; sleep 2")])
    server = await first.start()
    run = await Run(nats_url, fresh_run, tmp_path / "run", config(HarnessConfig(name="scout"))).open()
    await run.proxy_ready(first.socket)
    async with run.service("harness"):
        await run.place("g1x00", write_task(tmp_path / "task"))
        await run.expect(ExecutionStarted)
        while not first.requests:
            await asyncio.sleep(0.05)
        server.close()
        second = ScriptedModel(tmp_path / "run", [call("echo hello > hello.txt"), {"content": "done"}])
        await second.start()  # at another place even
        await run.proxy_ready(second.socket)
        [finished] = await run.expect(ExecutionFinished)
    assert finished.ending == "completed"
    assert (len(first.requests), len(second.requests)) == (1, 2)
    workspace.unpack(BlobStore(run.folder / "blobs").get(finished.artifact), tmp_path / "left")
    assert (tmp_path / "left" / "hello.txt").exists()
    await run.close()


@pytest.mark.skipif(
    not setup.is_complete("mini-swe-agent"),
    reason="not installed: python -m services.harness.setup mini-swe-agent",
)
async def test_mini_swe_agent_works_on_a_task(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    replies = [call("echo hello > hello.txt"), call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    harness = HarnessConfig(name="mini-swe-agent", extra_args=("-c", "{file:examples/minirepo/mini-swe-agent.yaml}"))
    model, _, finished, assessed = await trained(nats_url, fresh_run, tmp_path, harness, replies)
    log = (tmp_path / "run" / "logs" / "executions" / "g1x00.log").read_text()
    assert finished.ending == "completed", log
    assert (assessed.status, assessed.score) == ("scored", 1.0), log
    assert len(model.requests) == 2
    print(f"mini-swe-agent: {finished.cpu_seconds:.1f} CPU seconds")
