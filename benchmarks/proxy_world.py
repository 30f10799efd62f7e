"""A proxy to measure: nats-server, the stub engine and the proxy's service as processes of their own, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from services.cell_agent.engine.server import free_ports
from shared.events import ProxyReady, Sampling
from shared.nats_server import start_server
from tests.proxy.support import RUN_PROXY, TEXT, TOOLS, World, make_tokenizer

WORDS = tuple(TEXT.split())
SAID = "ok done<|im_end|>"
CHARACTERS_PER_TOKEN = 4.36  # of random WORDS under the tests' tokenizer


class Measured:
    """The processes, and the client's side of them. `run` publishes what scheduler and harness would."""

    def __init__(self, run: World, port: int, proxy: int, stub: int) -> None:
        self.run, self.engine_url = run, f"http://127.0.0.1:{port}"
        self.pids = {"proxy": proxy, "stub": stub}

    @property
    def url(self) -> str:
        return self.run.ready.url

    async def execution(self, name: str) -> str:
        """A new execution; returns its key."""
        await self.run.execution(
            name, key=f"key-{name}", harness="mini-swe-agent", sampling=Sampling(max_new_tokens=64)
        )
        return f"key-{name}"

    def cpu(self) -> dict[str, float]:
        """Processor seconds of each process so far."""
        return {name: cpu_of(pid) for name, pid in self.pids.items()}

    def memory_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pids['proxy']}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.asynccontextmanager
async def measured(context: int, delay_s: tuple[float, float]) -> AsyncIterator[Measured]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        tokenizer = make_tokenizer(folder / "model")
        server = start_server(folder / "nats")
        run = World(server.url, "bench", folder, folder / "model", context)
        (port,) = free_ports("127.0.0.1", 1)
        ids = json.dumps(tokenizer.encode(SAID, add_special_tokens=False))
        engine = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.proxy_stub", str(port), *map(str, delay_s), ids)
        )
        await run.begin()
        await run.cell(0, f"http://127.0.0.1:{port}")
        proxy = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN_PROXY, run.nats_url, run.run)
        try:
            async for message in run.control.read(1):
                if isinstance(message.event, ProxyReady):
                    run.ready = message.event
                    break
            yield Measured(run, port, proxy.pid, engine.pid)
        finally:
            for process in (proxy, engine):
                process.terminate()
                await process.wait()
            await run.end()
            server.kill()


def text(rng: random.Random, tokens: int) -> str:
    """About so many tokens of words."""
    return " ".join(rng.choices(WORDS, k=max(1, tokens)))


class Conversation:
    """The body of a harness's next call, grown without writing the old messages anew."""

    def __init__(self, first: str, *, stream: bool) -> None:
        self._head = b'{"model":"m","stream":%b,"tools":%b,"messages":[' % (
            b"true" if stream else b"false",
            orjson.dumps(TOOLS),
        )
        self._messages = [orjson.dumps({"role": "user", "content": first})]

    def body(self) -> bytes:
        return self._head + b",".join(self._messages) + b"]}"

    def answered(self, said: str, result: str) -> None:
        self._messages.append(orjson.dumps({"role": "assistant", "content": said}))
        self._messages.append(orjson.dumps({"role": "user", "content": result}))


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))]


def conditions() -> dict[str, Any]:
    """Of the machine: figures under load are upper bounds."""
    return {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "date": time.strftime("%Y-%m-%d %H:%M")}


def shown(result: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(result) if as_json else "\n".join(f"{k:<28} {v}" for k, v in result.items()))
