"""Calls per second through our proxy and through the LiteLLM proxy, with the same stub engine and requests.

LiteLLM is installed by this script into an environment of its own (.venvs/litellm). Each proxy is one process; LiteLLM
passes chat completions on to the stub's chat completions, ours to the stub's /generate, and records each call durably
before its reply. Both get the same bodies (OpenAI chat completions, not streamed, of `--tokens` tokens, each
conversation growing by `--new` tokens a call) from the same client, `--concurrent` conversations at a time; rounds of
the two alternate. The stub answers at once. Client, stub and nats-server share the machine with the proxy.

calls_per_s: of all rounds together. ratio: ours / LiteLLM's. Load comes from closed loops: a proxy that is slower gets
fewer requests, never a queue.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.proxy_world import Conversation, conditions, cpu_of, measured, shown, text
from services.cell_agent.engine.server import free_ports

LITELLM = "litellm[proxy]==1.83.4"
ENVIRONMENT = Path(".venvs/litellm")
START_LIMIT_S = 600.0  # it imports a great deal
CONFIG = """\
model_list:
  - model_name: m
    litellm_params: {model: openai/m, api_base: "ENGINE/v1", api_key: x}
litellm_settings: {telemetry: false, num_retries: 0, drop_params: true}
"""


def program() -> Path:
    """LiteLLM's program; installs it if it is not there."""
    found = ENVIRONMENT / "bin" / "litellm"
    if not found.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        pip = [str(ENVIRONMENT / "bin" / "pip"), "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, LITELLM], check=True)
    return found


@contextlib.asynccontextmanager
async def litellm(engine_url: str) -> AsyncIterator[tuple[str, int]]:
    """(base URL, process id) of a running LiteLLM proxy."""
    (port,) = free_ports("127.0.0.1", 1)
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "config.yaml"
        config.write_text(CONFIG.replace("ENGINE", engine_url))
        log = (Path(name) / "log").open("wb")
        command = [str(program()), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        environment = {**os.environ, "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        process = await asyncio.create_subprocess_exec(
            *command, "--num_workers", "1", env=environment, stdout=log, stderr=log
        )
        try:
            await _until_alive(f"http://127.0.0.1:{port}/health/liveliness", process, Path(name) / "log")
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


async def _until_alive(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    async with aiohttp.ClientSession() as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            if process.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"LiteLLM does not answer at {url}:\n{log.read_text()[-3000:]}")
            await asyncio.sleep(0.2)


async def play(
    http: aiohttp.ClientSession, url: str, key: str, talk: Conversation, seed: str, options: argparse.Namespace
) -> None:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    rng = random.Random(seed)
    for _ in range(options.calls):
        async with http.post(f"{url}/v1/chat/completions", data=talk.body(), headers=headers) as response:
            answer = await response.read()
        if response.status != 200:
            raise AssertionError(f"{url}: {response.status} {answer[:300]!r}")
        talk.answered(orjson.loads(answer)["choices"][0]["message"]["content"], text(rng, options.new))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    program()
    seconds: dict[str, float] = {"ours": 0.0, "litellm": 0.0}
    spent = dict(seconds)
    async with (
        measured(options.tokens * 4 + 50_000, (0.0, 0.0)) as world,
        litellm(world.engine_url) as (other_url, other_pid),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        sides = {"ours": (world.url, world.pids["proxy"]), "litellm": (other_url, other_pid)}
        for number in range(options.rounds + 1):  # the first one warms both
            names = [f"g{number * options.concurrent + n:06d}x00" for n in range(options.concurrent)]
            keys = [await world.execution(name) for name in names]
            for side, (url, pid) in sides.items():
                talks = [Conversation(f"{n} {text(random.Random(n), options.tokens)}", stream=False) for n in names]
                begun, before = time.perf_counter(), cpu_of(pid)
                await asyncio.gather(
                    *(
                        play(http, url, key, talk, name, options)
                        for name, key, talk in zip(names, keys, talks, strict=True)
                    )
                )
                if number:
                    seconds[side] += time.perf_counter() - begun
                    spent[side] += cpu_of(pid) - before
        records = len(await world.run.records())
    calls = options.rounds * options.concurrent * options.calls
    rates = {side: calls / took for side, took in seconds.items()}
    return {
        "ratio": round(rates["ours"] / rates["litellm"], 2),
        "calls_per_s": {side: round(rate, 1) for side, rate in rates.items()},
        "cpu_ms_per_call": {side: round(took / calls * 1e3, 2) for side, took in spent.items()},
        "calls_each": calls,
        "lost_records": calls // options.rounds * (options.rounds + 1) - records,
        "tokens": options.tokens,
        "new_tokens": options.new,
        "concurrent": options.concurrent,
        "litellm": LITELLM,
        **conditions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--new", type=int, default=200, help="new tokens per call")
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--calls", type=int, default=20, help="per conversation and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shown(asyncio.run(measure(options)), options.json)


if __name__ == "__main__":
    main()
