"""mini-swe-agent, live, through the proxy on a scripted engine."""

import pytest

from shared.events import Sampling
from tests.harnesses.programs import SUBMIT, mini_swe_agent
from tests.harnesses.world import calls_text, check_exact, roots

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]


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
