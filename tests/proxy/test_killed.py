"""The proxy as a process of its own, killed with SIGKILL while it works: harnesses' retries see nothing of it."""

import asyncio
import sys

import aiohttp

from shared.events import ProxyReady
from tests.proxy.support import RUN_PROXY, ScriptedEngine, Turn, World, call_text

USER = {"role": "user", "content": "write the file"}


async def start(run, after):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN_PROXY, run.nats_url, run.run)
    async for message in run.control.read(after + 1):
        if isinstance(message.event, ProxyReady):
            run.ready = message.event
            return process
    raise AssertionError


async def test_a_kill_between_and_inside_calls(nats_url, fresh_run, tmp_path, model_folder, tokenizer):
    run = World(nats_url, fresh_run, tmp_path, model_folder, context=1024)
    async with ScriptedEngine(tokenizer).running() as engine:
        engine.turns = [Turn(call_text("bash", '{"command": "ls"}')), Turn("lost<|im_end|>"), Turn("done<|im_end|>")]
        await run.begin()
        await run.cell(0, engine.url)
        await run.execution()
        process = await start(run, 0)
        first = await run.chat([USER])
        history = [USER, first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "ok"}]

        engine.gate = asyncio.Event()
        in_flight = asyncio.create_task(run.chat(history))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        url, last = run.ready.url, await run.control.last_sequence()
        process.kill()
        await process.wait()
        try:
            await in_flight
        except aiohttp.ClientError:
            engine.gate.set()
        assert engine.gate.is_set()

        process = await start(run, last)
        assert run.ready.url == url
        assert (await run.chat(history))["content"] == "done"
        records = await run.records()
        assert [r.parent for r in records] == ["", records[0].call]
        assert len({r.call for r in records}) == 2
        assert engine.requests[1]["input_ids"] == engine.requests[2]["input_ids"]
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
    await run.end()
