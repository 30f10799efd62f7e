"""mini-swe-agent, live, through the proxy on a scripted engine."""

import asyncio

import aiohttp
import pytest

from services.proxy.dialects.base import ApiError
from services.proxy.generating import Generating
from shared.events import CellRoleChanged, Sampling
from tests.harnesses.programs import mini_swe_agent
from tests.harnesses.world import calls_text, check_exact, roots

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]
SUBMIT = calls_text(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat hello.txt"}))


async def start(run):
    await run.execution(harness="mini-swe-agent", sampling=Sampling(max_new_tokens=4000))


def simple(seen):
    if seen.results == 0:
        return calls_text(("bash", {"command": "echo hi > hello.txt"}), text="I write the file.")
    return SUBMIT


async def test_simple_task(world):
    run, script, workspace = world
    await start(run)
    script.policy = simple
    ran = await mini_swe_agent(run.ready.url, "write hello.txt", workspace)
    assert ran.code == 0, ran.told
    assert (workspace / "hello.txt").read_text() == "hi\n"
    records = await check_exact(run, script)
    assert [r.call_class for r in records] == ["main_task"] * 2
    assert roots(records) == 1


async def test_parallel_and_malformed_calls(world):
    run, script, workspace = world
    await start(run)

    asked = []

    def policy(seen):
        asked.append(seen)
        if len(asked) == 1:
            return '<tool_call>\n{"name": "bash", "arguments": {"command": }}\n</tool_call>'
        if len(asked) == 2:
            return calls_text(
                ("bash", {"command": "echo a > a.txt"}), ("bash", {"command": "echo hi | tee b.txt hello.txt"})
            )
        return SUBMIT

    script.policy = policy
    ran = await mini_swe_agent(run.ready.url, "write two files", workspace)
    assert ran.code == 0, ran.told
    assert (workspace / "a.txt").exists()
    records = await check_exact(run, script)
    assert {r.call_class for r in records} == {"main_task"}
    # The program drops a turn whose arguments it cannot read, and says so as a user: nothing of it is continued.
    assert (len(records), roots(records)) == (3, 2)


async def test_a_role_switch_in_mid_call(world):
    run, script, workspace = world
    await start(run)
    long = "I think about it. " * 400

    def policy(seen):
        if seen.results == 0:
            return calls_text(("bash", {"command": "echo hi > hello.txt"}), text=long)
        return SUBMIT

    async def role(name, order):
        event = CellRoleChanged(cell=0, incarnation="i0", order=order, role=name, previous="", seconds=0.0, version=0)
        await run.publish("cell_agent", event)

    script.policy = policy
    running = asyncio.create_task(mini_swe_agent(run.ready.url, "write hello.txt", workspace))
    while not script.said and not running.done():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.4)
    await role("training", 1)
    async with aiohttp.ClientSession() as http:
        async with http.post(script.engine_url + "/abort_request", json={"rid": "", "abort_all": True}) as response:
            assert response.status == 200
    await asyncio.sleep(1.0)
    await role("rollout", 2)
    ran = await running
    assert ran.code == 0, ran.told
    records = await check_exact(run, script)
    assert (len(records), roots(records)) == (2, 1)
    assert records[0].queued_s > 0.5  # it was cut, waited, and went on
    assert len(records[0].output_ids) // 4 == len(script.said[records[0].call])


async def test_error_and_retry(world, monkeypatch):
    run, script, workspace = world
    await start(run)
    failed = []
    original = Generating.run

    async def failing(self, work, *arguments):
        if len(failed) < 2:
            failed.append(work)
            raise ApiError(503, "unavailable", "no engine", retry_after=1)
        return await original(self, work, *arguments)

    monkeypatch.setattr(Generating, "run", failing)
    script.policy = simple
    ran = await mini_swe_agent(run.ready.url, "write hello.txt", workspace)
    assert ran.code == 0, ran.told
    assert len(failed) == 2
    records = await check_exact(run, script)
    assert (roots(records), len(records)) == (1, 2)
