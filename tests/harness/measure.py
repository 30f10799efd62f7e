"""Measures the CPU time that starting, preserving and scoring one execution costs: python -m tests.harness.measure

Not a test. Prints CPU milliseconds per execution of the services (this process, both of them) and of the sandboxes.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import tempfile
import time
import uuid
from pathlib import Path

from shared.config import HarnessConfig, RunConfig
from shared.events import ExecutionAssessed, ExecutionFinished
from shared.nats_server import start_server
from tests.harness.support import Run, ScriptedModel, config, shell, write_task


def cpu(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


async def measure(url: str, folder: Path, settings: RunConfig, count: int) -> str:
    replies = [{"content": "done"}]
    model = ScriptedModel(folder, replies)
    await model.start()
    run = await Run(url, f"m{uuid.uuid4().hex[:8]}", folder / "run", settings).open()
    await run.proxy_ready(model.socket)
    task = write_task(folder / "task")
    async with run.service("harness"), run.service("evaluator"):
        await asyncio.sleep(1.0)
        own, children, begun = cpu(resource.RUSAGE_SELF), cpu(resource.RUSAGE_CHILDREN), time.monotonic()
        for number in range(count):
            await run.place(f"g1x{number:03d}", task)
        finished = await run.expect(ExecutionFinished, count, 300)
        assessed = await run.expect(ExecutionAssessed, count, 300)
        wall = time.monotonic() - begun
        own, children = cpu(resource.RUSAGE_SELF) - own, cpu(resource.RUSAGE_CHILDREN) - children
    harness = sum(f.cpu_seconds for f in finished)
    await run.close()
    assert {a.status for a in assessed} == {"scored"}, assessed
    return (
        f"services {1e3 * own / count:.1f} ms, sandboxes {1e3 * children / count:.1f} ms "
        f"(harness {1e3 * harness / count:.1f}), total {1e3 * (own + children) / count:.1f} ms CPU, "
        f"{1e3 * wall / count:.0f} ms wall per execution"
    )


async def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        server = start_server(Path(name) / "nats", with_parent=False)
        try:
            for title, command in (("sh", shell("echo hello > hello.txt")), ("scout", HarnessConfig(name="scout"))):
                folder = Path(name) / title
                folder.mkdir()
                print(f"{title}: {await measure(server.url, folder, config(command), count)}", flush=True)
        finally:
            server.kill()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
