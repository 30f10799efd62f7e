"""The shell of the proxy: stream in, HTTP in, engines and records out.

Invariant: requests are answered only when the whole history is known; after a restart the proxy listens at the same
unix socket, and at the same port if that is still free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from services.proxy import rendering
from services.proxy.app import ProxyApp
from services.proxy.bodies import Bodies
from services.proxy.calls import Calls
from services.proxy.core import AbortCalls, ProxyCore
from services.proxy.dialects.base import ApiError
from services.proxy.engine_client import EngineClient
from services.proxy.generating import Generating, Limits
from services.proxy.plans import Plans
from services.proxy.prompts import Prompts
from services.proxy.recorder import Recorder
from services.proxy.settling import Settling
from services.proxy.takeover import Takeover
from services.proxy.watch import Watch
from shared.bus import Stored
from shared.events import CallAdopted, CallCut, Event, ModelCallRecorded, ModelCallRefused, ProxyReady
from shared.runtime import ServiceContext, drive
from shared.telemetry import Trail

log = logging.getLogger("gyre.proxy")

LONGEST_SOCKET_PATH = 100  # the kernel takes 107 bytes
UNKNOWN_REPORTED = 100  # refused calls without an execution that are published, per process
SOCKET_MODE = 0o666  # a sandbox may run as another user; the key is what gives access


async def serve(ctx: ServiceContext) -> None:
    model, proxy = ctx.config.model, ctx.config.proxy
    renderer = await asyncio.to_thread(rendering.load, model.path, model.renderer, thinking=model.thinking)
    core, watch, engine = ProxyCore(), Watch(), EngineClient(renderer.stop_ids)

    meters = _Meters(ctx)

    async def publish(event: Event, msg_id: str) -> int:
        sequence = await ctx.bus.publish(event, msg_id=msg_id or None)
        if isinstance(event, ModelCallRecorded):
            meters.count(event)
        return sequence

    notices, recorder = _Notices(ctx), Recorder(core, publish, progress=proxy.progress_tokens)
    plans = Plans(_letters(ctx.args.get("instance", "")), notices.publish)
    prompts = Prompts(renderer, plans.profile)
    limits = Limits(model.context, proxy.call_timeout_s, ctx.config.cells.handover_timeout_s)
    trail = Trail()
    generating = Generating(core, renderer, prompts, engine, recorder, watch, limits, ctx.telemetry, trail)
    incarnation = uuid.uuid4().hex[:12]
    takeover = Takeover(core, engine, publish, watch, ctx.actor, incarnation)
    settling = Settling(core, generating, recorder, takeover)
    calls = Calls(core, prompts, plans, generating, recorder, takeover, settling)
    bodies = Bodies()
    app = ProxyApp(core, calls, bodies, watch, ctx.bus.last_sequence, notices.refused, model.name)
    listener = _Listener(app, ctx.run_dir / f"{ctx.actor}.sock", proxy.port)

    def observe(message: Stored) -> None:
        if isinstance(message.event, ProxyReady) and message.event.proxy == ctx.actor:
            listener.port = listener.port or urlsplit(message.event.url).port or 0
        if isinstance(message.event, CallCut | CallAdopted):
            trail.note(message.event.rid, message.headers)
        if message.event is not None:
            calls.heard(message.event)
        watch.seen(message.sequence)

    async def perform(command: object) -> None:
        if isinstance(command, AbortCalls):
            calls.abort(command)
            bodies.forget(command.execution)

    async def on_live() -> None:
        url, path = await listener.start()
        ready = ProxyReady(proxy=ctx.actor, url=url, socket=str(path), incarnation=incarnation)
        await ctx.bus.publish(ready)
        settling.all_that_are_over()
        log.info("serving at %s and %s", url, path)

    try:
        await drive(ctx, core, perform=perform, on_live=on_live, observe=observe)
    finally:
        await calls.close()
        await listener.stop()
        await notices.close()
        await engine.close()


class _Meters:
    """Prometheus figures of the recorded calls."""

    def __init__(self, ctx: ServiceContext) -> None:
        telemetry = ctx.telemetry
        self._calls = telemetry.counter("gyre_proxy_calls_total", "Recorded calls", ["call_class"])
        self._new = telemetry.counter("gyre_proxy_input_tokens_total", "Prompt tokens that no earlier call had")
        self._generated = telemetry.counter("gyre_proxy_output_tokens_total", "Generated tokens")
        self._discarded = telemetry.counter("gyre_proxy_discarded_total", "Calls whose reply nobody waited for")
        self._seconds = telemetry.histogram("gyre_proxy_call_seconds", "From prompt to durable record")

    def count(self, record: ModelCallRecorded) -> None:
        self._calls.labels(record.call_class).inc()
        self._new.inc(len(record.input_ids) // 4)
        self._generated.inc(len(record.output_ids) // 4)
        self._discarded.inc(record.discarded)
        self._seconds.observe(record.seconds)


class _Notices:
    """Publishes what harnesses were refused and what no profile knows; never in the way of an answer."""

    def __init__(self, ctx: ServiceContext) -> None:
        self._ctx, self._unknown = ctx, 0
        self._tasks: set[asyncio.Task[int]] = set()
        self._counter = ctx.telemetry.counter("gyre_proxy_refused_total", "Calls refused or failed", ["kind"])

    def refused(self, execution: str, error: ApiError) -> None:
        self._counter.labels(error.kind).inc()
        if not execution:
            self._unknown += 1
            if self._unknown > UNKNOWN_REPORTED:
                return
        self.publish(
            ModelCallRefused(execution=execution, status=error.status, kind=error.kind, message=error.message[:2000])
        )

    def publish(self, event: Event) -> None:
        task = asyncio.create_task(self._ctx.bus.publish(event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)


def _letters(name: str) -> str:
    """A proxy's name as it stands in call ids."""
    return "".join(c for c in name if c.isascii() and c.isalnum())


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the service frame owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Listener:
    """The TCP port and the unix socket of one app."""

    def __init__(self, app: ProxyApp, path: Path, port: int) -> None:
        self._app, self._path, self.port = app, _short(path), port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, Path]:
        tcp, unix = _bind_tcp(self.port), _bind_unix(self._path)
        config = uvicorn.Config(
            self._app.asgi(),
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[tcp, unix]), name="http")
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.01)
        host, port = tcp.getsockname()
        return f"http://{host}:{port}", self._path

    async def stop(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)


def _short(path: Path) -> Path:
    """`path`, or one in the temporary folder if the kernel would not take it as a socket's name."""
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    return Path(tempfile.gettempdir()) / f"gyre-{path.parent.name[-40:]}-{path.name[-30:]}"


def _bind_tcp(port: int) -> socket.socket:
    for candidate in (port, 0):
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tcp.bind(("127.0.0.1", candidate))
        except OSError as error:
            tcp.close()
            log.warning("port %d is taken (%s): using another one", candidate, error)
            continue
        return tcp
    raise OSError("no free TCP port on 127.0.0.1")


def _bind_unix(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.bind(str(path))
    path.chmod(SOCKET_MODE)
    return unix
