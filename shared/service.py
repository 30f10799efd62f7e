"""The frame of every service process: arguments in, exit code out; connection, run configuration, signals, logging.

Invariant: a service's `serve` starts only when the run's first event (RunStarted) was read, and the process ends with
code 0 exactly if `serve` returned after (or without) a stop request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared import ids
from shared.blobs import BlobStore
from shared.bus import Bus
from shared.config import RunConfig, from_plain
from shared.events import RunStarted
from shared.parent import die_with_parent
from shared.telemetry import Telemetry

log = logging.getLogger("gyre.service")

STOP_LIMIT_S = 15.0  # after a stop request; then what still runs is cancelled


@dataclass
class ServiceContext:
    """What a service gets. `actor` is unique among all processes of the run: the service, or service-cell."""

    bus: Bus
    run: str
    service: str
    actor: str
    config: RunConfig
    started: RunStarted
    run_dir: Path
    blobs: BlobStore
    telemetry: Telemetry
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    args: dict[str, str] = field(default_factory=dict)


Serve = Callable[[ServiceContext], Awaitable[None]]


class NotARun(RuntimeError):
    """The first event of the stream is no RunStarted."""


def actor_name(service: str, args: Mapping[str, str]) -> str:
    part = args.get("cell") or args.get("instance")
    return ids.check(f"{service}-{part}" if part else service)


async def open_context(
    service: str, nats_url: str, run: str, args: Mapping[str, str] | None = None, stop: asyncio.Event | None = None
) -> ServiceContext:
    """Connect and wait for RunStarted."""
    bus = await Bus.connect(nats_url, run, service)
    started = None
    async with contextlib.aclosing(bus.read(1)) as messages:
        async for message in messages:
            started = message.event
            break
    if not isinstance(started, RunStarted):
        await bus.close()
        found = type(started).__name__
        raise NotARun(f"the first event of {bus.stream} is {found}, not RunStarted: start the run with gyre up")
    config = from_plain(started.config)
    actor, run_dir = actor_name(service, args or {}), Path(started.run_dir)
    telemetry = Telemetry.start(actor, run_dir, config.telemetry)
    bus.inject = telemetry.inject
    blobs = BlobStore(run_dir / "blobs")
    return ServiceContext(
        bus, run, service, actor, config, started, run_dir, blobs, telemetry, stop or asyncio.Event(), dict(args or {})
    )


async def serve_main(name: str, nats_url: str, run: str, serve: Serve, args: Mapping[str, str] | None = None) -> int:
    """Run one service to its end; returns the exit code. `name` as on the command line, e.g. "cell-agent".

    SIGTERM and SIGINT set ctx.stop; `serve` has STOP_LIMIT_S to return then. A second signal ends it at once."""
    service = name.replace("-", "_")
    log_to_stderr(actor_name(service, args or {}))
    stop, now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        return await _serve(service, nats_url, run, serve, args, stop, now)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _serve(
    service: str,
    nats_url: str,
    run: str,
    serve: Serve,
    args: Mapping[str, str] | None,
    stop: asyncio.Event,
    now: asyncio.Event,
) -> int:
    async def whole() -> None:
        ctx = await open_context(service, nats_url, run, args, stop)
        ready.set()
        try:
            await serve(ctx)
        finally:
            await ctx.bus.close()
            await asyncio.to_thread(ctx.telemetry.shutdown)

    ready = asyncio.Event()
    work = asyncio.create_task(whole(), name=service)
    await _first(work, stop)
    if not work.done() and ready.is_set():  # else it still waits for the server or the run: nothing to end in order
        log.info("stopping")
        await _first(work, now, STOP_LIMIT_S)
        if not work.done():
            log.warning("not ended in time, cancelling")
    await end_tasks([work], again_s=STOP_LIMIT_S)
    if work.cancelled():
        return 1 if ready.is_set() else 0
    if work.exception() is not None:
        log.error("%s failed", service, exc_info=work.exception())
        return 1
    return 0


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], again_s: float | None = None) -> None:
    """Cancel and wait until all have ended; every `again_s` once more, since asyncio.wait_for of Python 3.11 can lose a
    cancellation (None: only once, for tasks that clean up at length)."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_s)


async def _first(work: asyncio.Task[None], event: asyncio.Event, timeout_s: float | None = None) -> None:
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({work, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def run_service(
    name: str,
    nats_url: str,
    run: str,
    serve: Serve,
    args: Mapping[str, str] | None = None,
    *,
    with_parent: bool = False,
) -> int:
    """`serve_main` on a uvloop of its own. With `with_parent` the process dies when the one that started it dies."""
    import uvloop

    if with_parent:
        parent = os.getppid()
        die_with_parent()
        if os.getppid() != parent:
            return 1
    return int(uvloop.run(serve_main(name, nats_url, run, serve, args)))


def log_to_stderr(actor: str, level: int = logging.INFO) -> None:
    """One line a record, with the actor's name in front; tracebacks follow on lines of their own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {actor} %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("nats").setLevel(logging.WARNING)
