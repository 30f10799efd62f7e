"""Many executions at once through one proxy, on two cores with a stub engine: errors, lost records, latency.

All `--executions` begin at the same time and play `--calls` turns each, one after the other, starting with a context of
`--tokens` tokens; the stub engine takes `--delay` seconds. Client, stub, nats-server and proxy share two cores. Every
reply is checked to be recorded once, as the continuation of the turn before it.

added_ms_*: time to the last byte beyond the stub's delay, of all calls, the first ones included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import time
from typing import Any

import aiohttp
import orjson

from benchmarks.proxy_stub import Answers
from benchmarks.proxy_world import Conversation, Measured, conditions, measured, quantile, shown, text
from shared.ids import call_id, request_id
from shared.tree import Tree

CORES = 2


async def play(
    world: Measured, http: aiohttp.ClientSession, name: str, key: str, options: argparse.Namespace, errors: list[str]
) -> list[float]:
    """Seconds of each call beyond the stub's delay."""
    rng = random.Random(name)
    delays = Answers(*options.delay, [])
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    talk = Conversation(f"{name} {text(rng, options.tokens)}", stream=False)
    times = []
    for number in range(1, options.calls + 1):
        begun = time.perf_counter()
        async with http.post(f"{world.url}/v1/chat/completions", data=talk.body(), headers=headers) as response:
            answer = await response.read()
        took = time.perf_counter() - begun
        if response.status != 200:
            errors.append(f"{name}: {response.status} {answer[:200]!r}")
            return times
        times.append(took - delays.delay(request_id(call_id(name, 1, number), 1).encode()))
        talk.answered(orjson.loads(answer)["choices"][0]["message"]["content"], text(rng, options.new))
    return times


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # inherited by all processes that follow
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * options.executions + 1000)), hard))
    errors: list[str] = []
    async with measured(options.tokens * 4 + 50_000, options.delay) as world:
        names = [f"g{n:06d}x00" for n in range(options.executions)]
        keys = [await world.execution(name) for name in names]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            begun, before = time.perf_counter(), world.cpu()
            playing = [play(world, http, n, k, options, errors) for n, k in zip(names, keys, strict=True)]
            times = [t for part in await asyncio.gather(*playing) for t in part]
            seconds = time.perf_counter() - begun
        spent, memory = world.cpu()["proxy"] - before["proxy"], world.memory_mb()
        records = await world.run.records()
    trees: dict[str, Tree] = {}
    for record in records:
        trees.setdefault(record.execution, Tree()).add(record)
    whole = sum(len(t.leaves()) == 1 and len(t.path(t.leaves()[0])) == options.calls for t in trees.values())
    return {
        "executions": options.executions,
        "calls": len(times),
        "errors": len(errors),
        "first_error": errors[0] if errors else "",
        "lost_records": options.executions * options.calls - len(records),
        "executions_recorded_whole": whole,
        "added_ms_p50": round(quantile(times, 0.5) * 1e3, 1),
        "added_ms_p99": round(quantile(times, 0.99) * 1e3, 1),
        "calls_per_s": round(len(times) / seconds, 1),
        "proxy_cpu_ms_per_call": round(spent / max(1, len(times)) * 1e3, 2),
        "proxy_memory_mb": round(memory, 1),
        "tokens": options.tokens,
        "delay_s": list(options.delay),
        **conditions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--new", type=int, default=200, help="new tokens per call")
    parser.add_argument("--delay", type=float, nargs=2, default=(2.0, 6.0))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shown(asyncio.run(measure(options)), options.json)


if __name__ == "__main__":
    main()
