"""What the proxy adds to a call, and how many executions it carries.

Processes of their own: nats-server, the proxy's service, and a stub that answers like an engine at once (NOT an engine:
it gives every call the same few tokens). `--tokens` sets the context of each conversation, `--concurrent` how many play
at a time, `--executions` how many there are in all. Printed: latency of a continuing call through the proxy, of the
same prompt sent to the stub directly, the difference, and whether every reply has its record.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from shared.events import ProxyReady, Sampling
from shared.nats_server import start_server
from tests.proxy.support import RUN_PROXY, TOOLS, World, make_tokenizer

STUB = "from benchmarks.proxy_latency import stub; import sys; stub(int(sys.argv[1]), sys.argv[2])"


def stub(port: int, ids: str) -> None:
    """The engine's counterpart, as a process."""
    rows = [[-0.5, t, None] for t in json.loads(ids)]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": rows, "weight_version": "v1"}
    answer = b"data: " + orjson.dumps({"meta_info": meta}) + b"\n\ndata: [DONE]\n\n"

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="text/event-stream")

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/generate", generate)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


async def one(run: World, name: str, tokens: int, calls: int) -> list[float]:
    """A conversation: a long first call, then `calls` measured ones."""
    key = f"key-{name}"
    await run.execution(name, key=key, harness="mini-swe-agent", sampling=Sampling(max_new_tokens=64))
    messages: list[Any] = [{"role": "user", "content": f"{name} " + "a " * tokens}]
    times = []
    for i in range(calls + 1):
        body = orjson.dumps({"model": "m", "messages": messages, "tools": TOOLS})
        begun = time.perf_counter()
        status, answer, _ = await run.post("/v1/chat/completions", body, key)
        if i:
            times.append(time.perf_counter() - begun)
        if status != 200:
            raise AssertionError(answer)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"go on {i}"}]
    return times


async def direct(url: str, tokens: int, calls: int, concurrent: int) -> list[float]:
    body = orjson.dumps({"rid": "x", "input_ids": [300] * tokens, "sampling_params": {}, "stream": True})
    times: list[float] = []

    async def client(http: aiohttp.ClientSession) -> None:
        for _ in range(calls):
            begun = time.perf_counter()
            async with http.post(f"{url}/generate", data=body) as response:
                await response.read()
            times.append(time.perf_counter() - begun)

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(client(http) for _ in range(concurrent)))
    return times


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def shown(times: list[float]) -> str:
    ordered = sorted(times)
    p50, p99 = statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, {len(times)} calls"


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "nats").mkdir()
        (folder / "model").mkdir()
        tokenizer = make_tokenizer(folder / "model")
        server = start_server(folder / "nats")
        run = World(server.url, "bench", folder, folder / "model", options.tokens + 50_000)
        ids = json.dumps(tokenizer.encode("ok done<|im_end|>", add_special_tokens=False))
        engine = await asyncio.create_subprocess_exec(sys.executable, "-c", STUB, str(options.port), ids)
        await run.begin()
        await run.cell(0, f"http://127.0.0.1:{options.port}")
        proxy = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN_PROXY, run.nats_url, run.run)
        try:
            async for message in run.control.read(1):
                if isinstance(message.event, ProxyReady):
                    run.ready = message.event
                    break
            room = asyncio.Semaphore(options.concurrent)

            async def guarded(number: int) -> list[float]:
                async with room:
                    return await one(run, f"g{number:06d}x00", options.tokens, options.calls)

            begun, spent = time.perf_counter(), cpu_of(proxy.pid)
            through = [t for ts in await asyncio.gather(*map(guarded, range(options.executions))) for t in ts]
            seconds, spent = time.perf_counter() - begun, cpu_of(proxy.pid) - spent
            plain = await direct(f"http://127.0.0.1:{options.port}", options.tokens, options.calls, options.concurrent)
            records = await run.records()
            wanted = options.executions * (options.calls + 1)
            added = (statistics.median(through) - statistics.median(plain)) * 1e3
            load = os.getloadavg()[0]
            print(
                f"{options.tokens} tokens, {options.concurrent} at a time, {options.executions} executions; "
                f"the machine's load {load:.0f} on {os.cpu_count()} cores"
            )
            print(f"through the proxy: {shown(through)}; {wanted / seconds:.0f} calls/s with the first calls")
            print(f"stub directly:     {shown(plain)}; added at the median: {added:.1f} ms")
            print(f"CPU of the proxy: {spent / wanted * 1e3:.1f} ms a call, first calls included")
            print(f"records: {len(records)} of {wanted}")
        finally:
            for process in (proxy, engine):
                process.terminate()
                await process.wait()
            await run.http.close()
            await run.control.close()
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--concurrent", type=int, default=8)
    parser.add_argument("--executions", type=int, default=8)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--port", type=int, default=18999)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
