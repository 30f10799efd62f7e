"""In every test run: mini-swe-agent and Claude Code, live, on a real engine. The other scenarios are marked slow."""

import pytest

from shared.events import Sampling
from tests.harnesses.programs import HARNESSES
from tests.harnesses.world import check_exact, roots

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("name", ["mini-swe-agent", "claude-code-latest"])
async def test_parallel_calls_of_a_simple_task(world, name):
    run, script, workspace = world
    harness = HARNESSES[name]
    await run.execution(harness=harness.profile, sampling=Sampling(max_new_tokens=4000))

    def policy(seen):
        if "<tools>" not in seen.turns[0][1]:
            return "A title"
        return harness.last if seen.results else harness.says("echo a > a.txt", "echo hi > hello.txt", text="I write.")

    script.policy = policy
    ran = await harness.run(run.ready.url, "write two files", workspace)
    assert ran.code == 0, ran.told
    assert (workspace / "hello.txt").read_text() == "hi\n"
    assert (workspace / "a.txt").exists()
    main = [r for r in await check_exact(run, script) if r.call_class == "main_task"]
    assert (len(main), roots(main)) == (2, 1)
    assert not any(r.diverged or r.discarded for r in main)
