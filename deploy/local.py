"""One run on one machine: an embedded nats-server and one process per service, supervised.

Invariant: everything a run needs is in its folder and its processes; a service that dies is started again and carries
on from the stream; when `LocalRun.close` returns, no process of the run is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from shared.bus import Bus
from shared.config import RunConfig
from shared.events import ServiceDied
from shared.ids import agent_cell, agent_service
from shared.nats_server import NatsServer, NatsServerFailed, start_server
from shared.parent import die_with_parent

RESTARTS = 5  # a service that dies more often than this ...
WINDOW_S = 180.0  # ... within this time is given up, and the run with it
STOP_S = 12.0  # twice: for all but the cell agents, then for these
WATCH_S = 0.25
AGENT = "cell-agent"


class RunFailed(RuntimeError):
    """The run cannot go on; the message says why, with the tail of the log that knows."""


class RunBusy(RuntimeError):
    """Another process drives this run."""


def service_names(config: RunConfig) -> list[str]:
    cells = [agent_service(k) for k in range(config.cells.engines)]
    return [*cells, "scheduler", "trajectory", "proxy", "evaluator", "harness"]


def service_command(name: str, url: str, run: str) -> list[str]:
    """The command line of one service: exactly what a person would type."""
    cell = agent_cell(name)
    kind = name if cell is None else AGENT
    command = [sys.executable, "-m", "cli.main", "serve", kind, "--nats", url, "--run", run]
    return command if cell is None else [*command, "--cell", str(cell)]


def log_tail(path: Path, lines: int = 25) -> str:
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class Service:
    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    deaths: deque[float] = field(default_factory=deque)


class LocalRun:
    """Starts, watches and stops the processes of a run. Use as an async context manager."""

    def __init__(self, config: RunConfig, run: str, folder: Path):
        self.config, self.run, self.folder = config, run, folder
        self.services = {name: Service(name, folder / "logs" / f"{name}.log") for name in service_names(config)}
        self.peak_rss = 0
        self.failed: str | None = None
        self.stopping = False
        self.server_gone = False  # for good: nothing can be published or read
        self.server: NatsServer | None = None
        self.bus: Bus | None = None
        self._lock: IO[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> LocalRun:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self._take_lock()
        if self.config.bus.url:
            url = self.config.bus.url
        else:
            self.server = start_server(self.folder / "nats")
            url = self.server.url
        (self.folder / "nats.url").write_text(url + "\n")
        self.bus = await Bus.connect(url, self.run, "control")
        await self.bus.create_stream()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _take_lock(self) -> None:
        self._lock = open(self.folder / "lock", "w")  # noqa: SIM115  (held as long as the run is driven)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            self._lock = None
            raise RunBusy(f"run {self.run} is being driven by another `gyre up`; stop that one first") from error

    @property
    def url(self) -> str:
        return (self.folder / "nats.url").read_text().strip()

    def start_services(self) -> None:
        for service in self.services.values():
            self._start(service)
        watches = [(s.name, self._watch(s)) for s in self.services.values()]
        if self.server is not None:
            watches.append(("nats-server", self._watch_server()))
        self._tasks = [asyncio.create_task(watch, name=f"the watch over {name}") for name, watch in watches]
        for task in self._tasks:
            task.add_done_callback(self._watch_ended)
        self._tasks.append(asyncio.create_task(self._measure()))

    def _start(self, service: Service) -> None:
        env = os.environ | {"OMP_NUM_THREADS": str(self.config.cells.threads), "PYTHONUNBUFFERED": "1"}
        with open(service.log, "ab") as log:
            service.process = subprocess.Popen(
                service_command(service.name, self.url, self.run),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )

    async def _watch_server(self) -> None:
        """Start nats-server again if it dies. Nothing here may wait for the bus, which waits for the server."""
        assert self.server is not None
        while True:
            await asyncio.sleep(WATCH_S)
            if self.server.process.poll() is not None:
                try:
                    self.server = start_server(self.folder / "nats", port=self.server.port)
                except (NatsServerFailed, OSError) as error:
                    self.server_gone, self.failed = True, f"nats-server died and cannot be started again: {error}"
                    return

    async def _watch(self, service: Service) -> None:
        """Start the service again when it dies; give the run up when it keeps dying."""
        while True:
            await asyncio.sleep(WATCH_S)
            if service.process is not None and (code := service.process.poll()) is not None:
                await self._on_death(service, code)

    async def _on_death(self, service: Service, code: int) -> None:
        assert self.bus is not None
        now = time.monotonic()
        service.process = None
        service.deaths.append(now)
        while service.deaths and service.deaths[0] < now - WINDOW_S:
            service.deaths.popleft()
        again = len(service.deaths) <= RESTARTS
        tail = log_tail(service.log)
        await self.bus.publish(ServiceDied(service=service.name, exit_code=code, will_restart=again, log_tail=tail))
        if not again:
            self.failed = f"{service.name} died {len(service.deaths)} times in {WINDOW_S:.0f} s. Its log ends:\n{tail}"
            return
        await asyncio.sleep(min(0.5 * 2 ** (len(service.deaths) - 1), 8.0))
        self._start(service)

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        """A watch ends by being cancelled; if it ends otherwise the run has no supervision any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed = self.failed or f"{task.get_name()} failed: {error}"

    async def _measure(self) -> None:
        """Peak of the summed resident memory of all processes of the run (shared pages count once per process)."""
        me = psutil.Process()
        while not self.stopping:
            total = 0
            for process in [me, *me.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_info().rss
            self.peak_rss = max(self.peak_rss, total)
            await asyncio.sleep(1.0)

    async def stop_services(self) -> None:
        """SIGTERM to all, then SIGKILL to what is left after a while; also to whatever they started.

        Cell agents come last: until their engines end, proxies can record what those generated."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        running = {n: s.process for n, s in self.services.items() if s.process is not None}
        live = list(running.values())
        families = [psutil.Process(p.pid).children(recursive=True) for p in live if p.poll() is None]
        agents = {name for name in running if agent_cell(name) is not None}
        for names in (running.keys() - agents, agents):
            await _terminate([running[name] for name in names])
        for process in live:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        children = [child for family in families for child in family]
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        deadline = time.monotonic() + STOP_S
        while any(map(_lives, children)) and time.monotonic() < deadline:  # who is killed is not gone at once
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self.stop_services()
        if self.bus is not None:
            await self.bus.close()
        if self.server is not None:
            self.server.stop()
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "nats.url").unlink()
        if self._lock is not None:
            self._lock.close()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


async def _terminate(processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM, and up to STOP_S for them to end."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        await asyncio.sleep(0.05)
