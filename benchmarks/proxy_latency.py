"""What the proxy adds to the latency of a model call, against the same call made to the engine directly.

`--concurrent` executions play at the same time, each with a context of `--tokens` tokens. Each turn is a pair: a
streamed OpenAI chat completion through the proxy (which carries the whole conversation as text), and then the very
body that the engine got for it, sent to the engine by the same client. The stub engine waits for `--delay` seconds
(drawn by the request's id, so both calls of a pair wait equally long, and the executions do not run in step) and
answers at once after that. Measured is the time to the last byte. Two calls of each execution come before the
measurement: they encode the long beginning and open the connections.

added_ms_p50, added_ms_p99: quantiles of the paired differences (proxy - direct). through_ms_*, direct_ms_*: quantiles
of each side beyond the stub's delay. Client, stub, nats-server and proxy share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

import aiohttp

from benchmarks.proxy_stub import Answers, rid_of
from benchmarks.proxy_world import Conversation, Measured, conditions, measured, quantile, shown, text
from tests.proxy.support import parse_events

WARM = 2  # calls of each execution before the measurement


class Turn:
    """Seconds beyond the engine's delay."""

    def __init__(self, through: float, direct: float) -> None:
        self.through, self.direct = through, direct


async def play(
    world: Measured, http: aiohttp.ClientSession, number: int, options: argparse.Namespace, begin: asyncio.Barrier
) -> list[Turn]:
    name = f"g{number:06d}x00"
    rng = random.Random(number)
    headers = {"authorization": f"Bearer {await world.execution(name)}", "content-type": "application/json"}
    talk = Conversation(f"{name} {text(rng, options.tokens)}", stream=True)
    delays = Answers(*options.delay, [])
    turns: list[Turn] = []

    async def direct(body: bytes) -> float:
        begun = time.perf_counter()
        async with http.post(f"{world.engine_url}/generate", data=body) as response:
            await response.read()
        return time.perf_counter() - begun - delays.delay(rid_of(body))

    for i in range(options.calls + WARM):
        if i == WARM:
            await begin.wait()
        body = talk.body()
        begun = time.perf_counter()
        async with http.post(f"{world.url}/v1/chat/completions", data=body, headers=headers) as response:
            answer = await response.read()
        took = time.perf_counter() - begun
        events = [data for _, data in parse_events(answer.decode()) if data != "[DONE]"]
        said = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e.get("choices"))
        if response.status != 200 or not said:
            raise AssertionError(f"{response.status} {answer[:300]!r}")
        async with http.get(f"{world.engine_url}/body/{name}") as response:
            sent = await response.read()
        if i >= WARM:
            turns.append(Turn(took - delays.delay(rid_of(sent)), await direct(sent)))
        talk.answered(said, text(rng, options.new))
    return turns


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    begin = asyncio.Barrier(options.concurrent + 1)
    async with measured(options.tokens * 2 + 50_000, options.delay) as world:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            playing = asyncio.gather(*(play(world, http, n, options, begin) for n in range(options.concurrent)))
            await asyncio.wait({asyncio.ensure_future(begin.wait()), playing}, return_when=asyncio.FIRST_COMPLETED)
            before = world.cpu()
            played = await playing
            spent = {name: after - before[name] for name, after in world.cpu().items()}
        records = len(await world.run.records())
    turns = [turn for part in played for turn in part]
    calls = options.concurrent * (options.calls + WARM)
    added = [t.through - t.direct for t in turns]
    return {
        "added_ms_p50": ms(added, 0.5),
        "added_ms_p99": ms(added, 0.99),
        "through_ms_p50": ms([t.through for t in turns], 0.5),
        "through_ms_p99": ms([t.through for t in turns], 0.99),
        "direct_ms_p50": ms([t.direct for t in turns], 0.5),
        "direct_ms_p99": ms([t.direct for t in turns], 0.99),
        "pairs": len(turns),
        "tokens": options.tokens,
        "new_tokens": options.new,
        "concurrent": options.concurrent,
        "delay_s": list(options.delay),
        "proxy_cpu_ms_per_call": round(spent["proxy"] / len(turns) * 1e3, 2),
        "records": f"{records} of {calls}",
        **conditions(),
    }


def ms(seconds: list[float], q: float) -> float:
    return round(quantile(seconds, q) * 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--new", type=int, default=500, help="new tokens per call")
    parser.add_argument("--concurrent", type=int, default=8)
    parser.add_argument("--calls", type=int, default=40, help="measured pairs per execution")
    parser.add_argument("--delay", type=float, nargs=2, default=(0.05, 0.2))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shown(asyncio.run(measure(options)), options.json)


if __name__ == "__main__":
    main()
