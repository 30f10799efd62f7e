"""Parts of the harness and evaluator tests: task folders, a run on a real stream, both services, a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from services.evaluator import service as evaluator
from services.harness import service as harness
from shared.bus import Bus
from shared.config import (
    AssessmentConfig,
    ExecutionConfig,
    HarnessConfig,
    ModelConfig,
    RunConfig,
    TasksConfig,
    to_plain,
)
from shared.events import Event, ExecutionDispatched, ExecutionPlaced, ProxyReady, RunStarted, Sampling
from shared.runtime import ServiceContext
from shared.service import open_context

TEST_SH = 'if [ "$(cat hello.txt)" = hello ]; then echo 1; else echo 0.25; fi > /logs/verifier/reward.txt\n'


def write_task(folder: Path, test_sh: str = TEST_SH, toml: str = 'version = "1.0"\n') -> Path:
    for name, text in {
        "task.toml": toml,
        "instruction.md": "Write hello into hello.txt.\n",
        "environment/workspace/README.md": "start\n",
        "tests/test.sh": test_sh,
        "tests/secret.txt": "hidden-answer\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def shell(script: str) -> HarnessConfig:
    """A harness that is a shell script."""
    return HarnessConfig(name="shell", command=("/bin/sh", "-c", script, "{instruction}"))


def config(
    command: HarnessConfig, execution: ExecutionConfig | None = None, assessment: AssessmentConfig | None = None
) -> RunConfig:
    return RunConfig(
        name="test",
        model=ModelConfig(path="model"),
        tasks=TasksConfig(train="tasks"),
        harness=command,
        execution=execution or ExecutionConfig(harness_time_limit_s=20.0, overall_budget_s=60.0, start_attempts=2),
        assessment=assessment or AssessmentConfig(timeout_s=10.0),
    )


class ScriptedModel:
    """Stands in for proxy and model: answers chat completions on a unix socket with the replies it was given."""

    def __init__(self, folder: Path, replies: list[dict]) -> None:
        self.socket = folder / "model-api.sock"
        self.replies = replies
        self.requests: list[tuple[dict[str, str], dict]] = []

    async def start(self) -> asyncio.Server:
        self.socket.unlink(missing_ok=True)
        return await asyncio.start_unix_server(self._serve, str(self.socket))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:]) if k}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))) or b"{}")
        self.requests.append((headers, body))
        message = self.replies[min(len(self.requests), len(self.replies)) - 1]
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        reply = {
            "id": "c1",
            "object": "chat.completion",
            "created": 0,
            "model": body.get("model", ""),
            "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
        }
        data = json.dumps(reply).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n")
        writer.write(f"content-length: {len(data)}\r\n\r\n".encode() + data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()


class Run:
    """A run on a real stream, and the services under test as tasks of this process."""

    def __init__(self, url: str, run: str, folder: Path, settings: RunConfig) -> None:
        self.url, self.run, self.folder, self.settings = url, run, folder, settings
        self.control: Bus
        self.scheduler: Bus
        self.proxy: Bus

    async def open(self) -> Run:
        self.control, self.scheduler, self.proxy = [
            await Bus.connect(self.url, self.run, service) for service in ("control", "scheduler", "proxy")
        ]
        await self.control.create_stream()
        started = RunStarted(
            run=self.run,
            config=to_plain(self.settings),
            run_dir=str(self.folder),
            train_tasks=(),
            eval_tasks={},
            started_at=time.time(),
        )
        await self.control.publish(started, msg_id="started")
        return self

    async def close(self) -> None:
        for bus in (self.control, self.scheduler, self.proxy):
            await bus.close()

    async def proxy_ready(self, socket: Path) -> None:
        await self.proxy.publish(ProxyReady(proxy="proxy", url="http://127.0.0.1:1", socket=str(socket)))

    async def place(self, execution: str, task: Path) -> None:
        common = {"execution": execution, "group": execution.split("x")[0], "task": str(task), "sampling": Sampling()}
        await self.scheduler.publish(ExecutionDispatched(index=0, purpose="train", policy_version=0, **common))
        await self.scheduler.publish(ExecutionPlaced(cell=0, policy_version=0, **common))

    async def events(self) -> list[Event]:
        end = await self.control.last_sequence()
        return [m.event async for m in self.control.read_until(end) if m.event is not None]

    async def expect(self, kind: type[Event], count: int = 1, limit_s: float = 30.0) -> list:
        """The events of one kind, once there are `count`."""
        found: list[Event] = []
        async with asyncio.timeout(limit_s):
            async for message in self.control.read(1):
                if isinstance(message.event, kind):
                    found.append(message.event)
                if len(found) >= count:
                    break
        return found

    @contextlib.asynccontextmanager
    async def service(self, name: str) -> AsyncIterator[ServiceContext]:
        """`harness` or `evaluator`, stopped in order at the end."""
        ctx = await open_context(name, self.url, self.run)
        serve: Callable = {"harness": harness.serve, "evaluator": evaluator.serve}[name]
        task = asyncio.create_task(serve(ctx))
        try:
            yield ctx
            if task.done():
                task.result()
        finally:
            ctx.stop.set()
            await asyncio.wait({task}, timeout=15)
            await ctx.bus.close()
            ctx.telemetry.shutdown()
            if not task.done():
                task.cancel()
                raise TimeoutError(f"{name} did not stop")
            task.result()


def processes_with(text: str) -> list[str]:
    """Command lines of live processes that contain `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            if text in line:
                found.append(line)
    return found


def replaced(settings: RunConfig, **changes: object) -> RunConfig:
    return msgspec.structs.replace(settings, **changes)
