"""Calls that outlive the process of the proxy that began them: nothing is sampled twice, no token is lost."""

import asyncio
import contextlib
import sys

import aiohttp
import pytest
import pytest_asyncio

from shared import events as ev
from shared.codec import unpack_floats, unpack_ids
from tests.proxy.support import EXECUTION, RUN_PROXY, ScriptedEngine, Turn, World
from tests.proxy.test_handover import finished

USER = {"role": "user", "content": "write the file"}
ASK = {"model": "m", "messages": [USER]}
TEXT = "one two three result output error task code test file run list done a write the of to is and<|im_end|>"
SAID = TEXT.removesuffix("<|im_end|>")


@pytest.fixture
def ids(tokenizer):
    return tokenizer.encode(TEXT, add_special_tokens=False)


def rest_of(engine, tokenizer, ids, **turn):
    """Engine behaviour: say TEXT, from wherever a request goes on with it."""

    def choose(body):
        said = len(body["input_ids"]) - len(engine.requests[0]["input_ids"])
        return Turn(tokenizer.decode(ids[said:]), versions=(("v4", 0, 99),), **({} if said else turn))

    return choose


class Proxy:
    """A proxy as a process of its own, and a harness's connection to it."""

    def __init__(self, world, instance):
        self.world, self.instance = world, instance
        self.process = None

    async def start(self):
        after = await self.world.control.last_sequence()
        arguments = [self.world.nats_url, self.world.run, *([self.instance] if self.instance else [])]
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN_PROXY, *arguments)
        async for message in self.world.control.read(after + 1):
            if isinstance(message.event, ev.ProxyReady):
                self.url = message.event.url
                return self
        raise AssertionError

    async def chat(self, body=ASK):
        headers = {"authorization": "Bearer secret"}
        async with self.world.http.post(self.url + "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return (await response.json())["choices"][0]["message"]["content"]

    async def kill(self):
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def stop(self):
        self.process.terminate()
        assert await asyncio.wait_for(self.process.wait(), 20) == 0


@pytest_asyncio.fixture
async def stage(nats_url, fresh_run, tmp_path, model_folder, tokenizer, ids):
    """(run, engine, proxy maker); the engine says TEXT, slowly, for requests that begin it."""
    run = World(nats_url, fresh_run, tmp_path, model_folder, context=1024)
    proxies = []

    async def proxy(instance=""):
        proxies.append(Proxy(run, instance))
        return await proxies[-1].start()

    async with ScriptedEngine(tokenizer).running() as engine:
        engine.choose = rest_of(engine, tokenizer, ids, pause_s=0.25)
        await run.begin(progress_tokens=3)
        await run.cell(0, engine.url)
        await run.execution()
        yield run, engine, proxy
        for one in proxies:
            await one.kill()
        await run.end()


async def until(check):
    async with asyncio.timeout(30):
        while not check():
            await asyncio.sleep(0.02)


async def broken(call):
    with contextlib.suppress(aiohttp.ClientError):
        await call


async def events_of(run, kind):
    end = await run.control.last_sequence()
    return [m.event async for m in run.control.read_until(end) if isinstance(m.event, kind)]


async def until_recorded(run):
    async with asyncio.timeout(30):
        while not await run.records():
            await asyncio.sleep(0.05)


async def check_whole(run, engine, ids):
    """One record with every token once, and no token was generated twice."""
    (record,) = await run.records()
    assert unpack_ids(record.output_ids).tolist() == ids
    assert [s.start for s in record.versions] + [len(ids)] == [0] + [s.end for s in record.versions]
    assert len(unpack_floats(record.output_logprobs)) == len(ids)
    prompt = engine.requests[0]["input_ids"]
    assert unpack_ids(record.input_ids).tolist() == prompt
    assert all(r["input_ids"] == prompt + ids[: len(r["input_ids"]) - len(prompt)] for r in engine.requests)
    generated = sum(k["meta_info"]["output_token_logprobs_length"] for k in engine.kept.values())
    assert generated == len(ids)
    assert not await events_of(run, ev.ModelCallDropped)
    return record


async def test_a_restarted_proxy_goes_on_where_the_killed_one_was(stage, ids):
    run, engine, proxy = stage
    first = await proxy()
    call = asyncio.create_task(first.chat())
    await until(lambda: engine.kept)
    await asyncio.sleep(0.6)  # six tokens are out, of which the stream holds some
    await first.kill()
    await broken(call)
    second = await proxy()
    assert await second.chat() == SAID
    record = await check_whole(run, engine, ids)
    assert len(engine.requests) == 2
    assert not record.discarded
    assert [b.take for b in await events_of(run, ev.ModelCallBegun)] == [0, 1]


async def test_what_the_engine_had_finished_is_not_sampled_again(stage, tokenizer, ids):
    run, engine, proxy = stage
    engine.choose = rest_of(engine, tokenizer, ids)
    engine.gate = asyncio.Event()
    first = await proxy()
    call = asyncio.create_task(first.chat())
    await until(lambda: engine.requests)
    first.process.send_signal(19)  # stopped: it will never read the answer
    engine.gate.set()
    await until(lambda: not engine.live)
    await first.kill()
    await broken(call)
    second = await proxy()
    assert await second.chat() == SAID
    record = await check_whole(run, engine, ids)
    assert len(engine.requests) == 1
    assert record.cell == 0


async def test_another_proxy_takes_over_from_a_killed_one(stage, ids):
    run, engine, proxy = stage
    first, second = await proxy("1"), await proxy("2")
    call = asyncio.create_task(first.chat())
    await until(lambda: engine.kept)
    await asyncio.sleep(0.5)
    await first.kill()
    await broken(call)
    assert await second.chat() == SAID
    await check_whole(run, engine, ids)


async def test_a_harness_that_turns_to_another_proxy_gets_the_call_in_flight(stage, ids):
    run, engine, proxy = stage
    first, second = await proxy("1"), await proxy("2")
    call = asyncio.create_task(first.chat())
    await until(lambda: engine.kept)
    call.cancel()
    await asyncio.sleep(0.2)
    assert await second.chat() == SAID
    await check_whole(run, engine, ids)
    assert len(engine.requests) == 1
    assert [e.take for e in await events_of(run, ev.ModelCallBegun)] == [0]
    assert len(await events_of(run, ev.ModelCallLeft)) == 1
    (record,) = await run.records()
    assert [m.discarded for m in await events_of(run, ev.ModelCallMarked)] == ([False] if record.discarded else [])


async def test_two_proxies_that_are_asked_at_once_after_a_kill_make_one_record(stage, ids):
    run, engine, proxy = stage
    first, second, third = await proxy("1"), await proxy("2"), await proxy("3")
    call = asyncio.create_task(first.chat())
    await until(lambda: engine.kept)
    await asyncio.sleep(0.5)
    await first.kill()
    await broken(call)
    assert await asyncio.gather(second.chat(), third.chat()) == [SAID, SAID]
    await check_whole(run, engine, ids)


async def test_a_proxy_that_hung_loses_its_call_and_gives_its_harness_the_reply_all_the_same(stage, ids):
    run, engine, proxy = stage
    first, second = await proxy("1"), await proxy("2")
    call = asyncio.create_task(first.chat())
    await until(lambda: engine.kept)
    await asyncio.sleep(0.2)
    first.process.send_signal(19)
    assert await second.chat() == SAID
    first.process.send_signal(18)
    assert await asyncio.wait_for(call, 20) == SAID
    await check_whole(run, engine, ids)


async def test_the_same_request_twice_at_once_is_two_samples(stage, tokenizer):
    run, engine, proxy = stage
    engine.choose = lambda _body: Turn("ok<|im_end|>", delay_s=2.5)
    first, second = await proxy("1"), await proxy("2")
    assert await asyncio.gather(first.chat(), second.chat()) == ["ok", "ok"]
    assert len(await run.records()) == 2


async def test_a_stopped_proxy_leaves_its_calls_to_the_next_one(stage, ids):
    run, engine, proxy = stage
    first = await proxy()
    call = asyncio.create_task(first.chat())
    await until(lambda: engine.kept)
    await asyncio.sleep(0.5)
    await first.stop()
    with pytest.raises((aiohttp.ClientError, AssertionError)):
        await call
    assert await run.records() == []
    second = await proxy()
    assert await second.chat() == SAID
    await check_whole(run, engine, ids)


async def test_a_call_that_nobody_asks_for_again_is_recorded_when_its_execution_ends(stage, ids):
    run, engine, proxy = stage
    first = await proxy()
    call = asyncio.create_task(first.chat())
    await until(lambda: engine.kept)
    await asyncio.sleep(0.5)
    await first.kill()
    await broken(call)
    await proxy()
    await run.publish("harness", finished())
    await until_recorded(run)
    (record,) = await run.records()
    (rid,) = engine.kept
    got = len(record.output_ids) // 4
    assert got == engine.kept[rid]["meta_info"]["output_token_logprobs_length"] > 0
    assert unpack_ids(record.output_ids).tolist() == ids[:got]
    assert unpack_ids(record.input_ids).tolist() == engine.requests[0]["input_ids"]
    assert (record.discarded, record.finish_reason, record.context) == (True, "abort", "")


async def test_a_call_of_an_execution_that_ended_while_no_proxy_ran_is_recorded_by_the_next(stage):
    run, engine, proxy = stage
    first = await proxy()
    call = asyncio.create_task(first.chat())
    await until(lambda: engine.kept)
    await first.kill()
    await broken(call)
    await run.publish("harness", finished())
    await proxy()
    await until_recorded(run)
    assert [r.discarded for r in await run.records()] == [True]


async def test_the_stream_alone_is_enough_where_the_engine_died_too(stage, tokenizer, ids):
    run, engine, proxy = stage
    first = await proxy()
    call = asyncio.create_task(first.chat())
    while not await events_of(run, ev.ModelCallProgressed):
        await asyncio.sleep(0.05)
    await first.kill()
    await broken(call)
    engine.forgets = True
    progressed = await events_of(run, ev.ModelCallProgressed)
    noted = sum(len(e.output_ids) // 4 for e in progressed)
    second = await proxy()
    assert await second.chat() == SAID
    (record,) = await run.records()
    assert unpack_ids(record.output_ids).tolist() == ids
    assert engine.requests[1]["input_ids"] == engine.requests[0]["input_ids"] + ids[:noted]


async def test_what_is_lost_for_good_is_told(stage):
    run, engine, proxy = stage
    first = await proxy()
    call = asyncio.create_task(first.chat())
    while not await events_of(run, ev.ModelCallProgressed):
        await asyncio.sleep(0.05)
    await first.kill()
    await broken(call)
    engine.forgets = True
    await run.publish("harness", finished())
    await proxy()
    async with asyncio.timeout(20):
        while not (told := await events_of(run, ev.ModelCallDropped)):
            await asyncio.sleep(0.05)
    assert told[0].call.startswith(EXECUTION)
    assert told[0].tokens >= 3
    assert await run.records() == []
