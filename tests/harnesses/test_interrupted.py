"""Every harness program, interrupted in the middle of its work: errors, a proxy that goes away, an engine that does."""

import asyncio

import aiohttp
import pytest

from services.proxy.dialects.base import ApiError
from services.proxy.generating import Generating
from shared.events import CellRoleChanged, ModelCallBegun, Sampling
from tests.harnesses.programs import HARNESSES
from tests.harnesses.world import check_exact, roots

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]
LONG = "I think about it. " * 300


@pytest.fixture(params=HARNESSES)
def harness(request):
    return HARNESSES[request.param]


async def begin(world, harness):
    """Start the harness on a task; the policy thinks for long before it acts."""
    run, script, workspace = world
    await run.execution(harness=harness.profile, sampling=Sampling(max_new_tokens=4000))

    def policy(seen):
        if "<tools>" not in seen.turns[0][1]:
            return "A title"
        return harness.last if seen.results else harness.says("echo hi > hello.txt", text=LONG)

    script.policy = policy
    return asyncio.create_task(harness.run(run.ready.url, "write hello.txt", workspace))


async def in_mid_call(script, running):
    """Until the policy is in the middle of its long turn."""
    while not any(len(said) > 200 for said in script.said.values()) and not running.done():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.4)


async def ended_well(world, running):
    """The main line's records: two calls, one conversation, every token once."""
    run, script, workspace = world
    ran = await running
    assert ran.code == 0, ran.told
    assert (workspace / "hello.txt").exists(), ran.told
    main = [r for r in await check_exact(run, script) if r.call_class == "main_task"]
    assert (len(main), roots(main)) == (2, 1), [(r.call, r.parent, r.diverged) for r in main]
    assert len(main[0].output_ids) // 4 == len(script.said[main[0].call])
    return main


async def test_errors_are_tried_again(world, harness, monkeypatch):
    failed = []
    original = Generating.run

    async def failing(self, work, *arguments):
        if work.request.tools and len(failed) < 2:
            failed.append(work)
            raise ApiError(503, "unavailable", "no engine", retry_after=1)
        return await original(self, work, *arguments)

    monkeypatch.setattr(Generating, "run", failing)
    await ended_well(world, await begin(world, harness))
    assert len(failed) == 2


async def test_a_proxy_that_restarts_goes_on_with_the_call(world, harness):
    run, script, _ = world
    running = await begin(world, harness)
    await in_mid_call(script, running)
    url = run.ready.url
    await run.stop_proxy()
    await run.start_proxy()
    assert run.ready.url == url
    first, _ = await ended_well(world, running)
    end = await run.control.last_sequence()
    begun = [m.event async for m in run.control.read_until(end) if isinstance(m.event, ModelCallBegun)]
    assert [b.take for b in begun if b.call == first.call] == [0, 1]


async def test_a_call_that_its_engine_cuts_goes_on(world, harness):
    run, script, _ = world

    async def role(name, order):
        event = CellRoleChanged(cell=0, incarnation="i0", order=order, role=name, previous="", seconds=0.0, version=0)
        await run.publish("cell_agent", event)

    running = await begin(world, harness)
    await in_mid_call(script, running)
    await role("training", 1)
    async with aiohttp.ClientSession() as http:
        async with http.post(script.engine_url + "/abort_request", json={"rid": "", "abort_all": True}) as response:
            assert response.status == 200
    await asyncio.sleep(1.0)
    await role("rollout", 2)
    first, _ = await ended_well(world, running)
    assert first.queued_s > 0.5  # it was cut, waited, and went on
