"""Starts and watches the training workers of one cell; the agent's only door to them.

Owns the worker processes, their log file and the socket. Invariants: every call gets exactly one outcome (its reply,
`TrainerFailed`, or `TrainerDied`), also when the workers die while it waits; no worker outlives `close` or the agent
process itself (the workers watch for their parent).

    handle = await launch(cell=0, config=config, run_dir=run_dir, log_path=run_dir / "logs/trainer-0.log", device="cpu")
    await handle.call(protocol.Load(id=0, hf_path=config.model.path))
    replies = await asyncio.gather(*(handle.call(protocol.Train(id=0, payload=p)) for p in payloads))
    await handle.close()

Ids: the handle numbers the messages itself; whatever id a message carries is replaced. Commands are executed in the
order in which `call` was entered, so several Train calls may wait at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from services.cell_agent.logs import log_tail
from services.cell_agent.trainer import protocol
from services.cell_agent.trainer.lines import Lines, read_frame, send_frame
from shared.config import RunConfig

REPOSITORY = Path(__file__).resolve().parents[3]
WORKER = "services.cell_agent.trainer.worker"
RECEIVER = "services.cell_agent.receiver"
LISTEN_S = 5.0
SILENT_TIMES = 6  # in a row: counted, not timed, so that an agent that was stopped itself blames nobody
AT_DISK = (protocol.Load, protocol.Save, protocol.Export)  # libraries may hold the interpreter for a whole file:
AT_DISK_TIMES = 120  # so much patience then


class TrainerError(Exception):
    """Base of everything that goes wrong between agent and training workers."""


class TrainerStartError(TrainerError):
    """The workers did not say Hello in time, or died before."""


class TrainerDied(TrainerError):
    """A worker process ended; the cell's trainer has to be launched again and loaded from the last checkpoint."""


class TrainerFailed(TrainerError):
    """A command could not be carried out. `fatal`: the workers exit after saying so; otherwise (Pull, Refit: the peer
    or the engine is to blame) they go on and the command may be given again."""

    def __init__(self, message: str, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal


@dataclass(frozen=True)
class TrainerExit:
    """What `TrainerHandle.exited` resolves to. `asked`: after `close`. `returncodes`: by rank, None = had to be
    killed."""

    asked: bool
    returncodes: tuple[int | None, ...]
    log_tail: str
    silent_s: float = 0.0  # killed because nothing was heard of some of them for so long:
    silent: tuple[int, ...] = ()  # these ranks

    @property
    def how(self) -> str:
        if self.silent_s:
            ranks = ", ".join(map(str, self.silent))
            return f"were killed: rank {ranks} gave no sign of life for {self.silent_s:.0f} s (stopped, or hung)"
        return f"died with exit codes {self.returncodes}"


class TrainerHandle:
    """A running trainer. `exited` is a future that resolves (never raises) when any worker process has ended."""

    def __init__(
        self,
        cell: int,
        log_path: Path,
        processes: list[asyncio.subprocess.Process],
        lines: Lines,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hello: protocol.Hello,
    ) -> None:
        self.cell = cell
        self.log_path = log_path
        self.hello = hello
        self.exited: asyncio.Future[TrainerExit] = asyncio.get_running_loop().create_future()
        self._processes = processes
        self._lines = lines
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[protocol.Reply]] = {}
        self._closing = False
        self._at_disk = 0  # commands
        self._silent_s = 0.0
        self._silent: tuple[int, ...] = ()  # ranks
        self._listen = asyncio.create_task(self._watch_silence(), name=f"trainer-{cell}-silence")
        self._watch = asyncio.create_task(self._watch_processes(), name=f"trainer-{cell}-watch")
        self._read = asyncio.create_task(self._read_replies(), name=f"trainer-{cell}-read")

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(p.pid for p in self._processes)

    async def call(self, message: protocol.Command) -> protocol.Reply:
        """Send a command and wait for its reply. Raises TrainerFailed (the workers said no) or TrainerDied."""
        if self.exited.done() or self._closing:
            raise TrainerDied(f"trainer of cell {self.cell} is not running; launch it again")
        number = next(self._ids)
        future: asyncio.Future[protocol.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        at_disk = isinstance(message, AT_DISK)
        self._at_disk += at_disk
        try:
            send_frame(self._writer, msgspec.structs.replace(message, id=number))
            with contextlib.suppress(ConnectionError):  # the watcher fails `future` with the reason and the log's tail
                await self._writer.drain()
            reply = await future
        finally:
            self._waiting.pop(number, None)
            self._at_disk -= at_disk
        if isinstance(reply, protocol.Failed):
            what = f"{type(message).__name__} failed in the trainer of cell {self.cell}: {reply.reason}"
            raise TrainerFailed(what, reply.fatal)
        return reply

    async def close(self, grace_s: float = 5.0) -> TrainerExit:
        """Ask the workers to leave, kill what is left after `grace_s`; idempotent."""
        if not self.exited.done() and not self._closing:
            with contextlib.suppress(ConnectionError):
                send_frame(self._writer, protocol.Exit(id=next(self._ids)))
        self._closing = True
        try:
            await asyncio.wait_for(asyncio.shield(self._watch), grace_s)
        except TimeoutError:
            await _kill(self._processes)
        outcome = await self.exited
        self._listen.cancel()
        self._read.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._read
        self._writer.close()
        return outcome

    async def _watch_silence(self) -> None:
        """Kill workers of which one rank is not heard of any more; `_watch_processes` tells the rest."""
        silent: dict[int, int] = {}  # by rank, for how many times LISTEN_S
        while not silent:
            await asyncio.sleep(LISTEN_S)
            enough = AT_DISK_TIMES if self._at_disk else SILENT_TIMES
            silent = {rank: n for rank, n in self._lines.count().items() if n >= enough}
        self._silent, self._silent_s = tuple(silent), max(silent.values()) * LISTEN_S
        await _kill(self._processes)

    async def _watch_processes(self) -> None:
        waits = [asyncio.create_task(p.wait()) for p in self._processes]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not self._closing:
            await asyncio.wait(waits, timeout=1.0)  # a failing rank takes the others down by itself, mostly
            await _kill(self._processes)
        await asyncio.gather(*waits)
        codes = tuple(p.returncode for p in self._processes)
        self._listen.cancel()
        outcome = TrainerExit(self._closing, codes, log_tail(self.log_path), self._silent_s, self._silent)
        await asyncio.wait([self._read], timeout=1.0)  # replies that were on their way still count
        error = TrainerDied(f"the workers of cell {self.cell} {outcome.how}; end of their log:\n{outcome.log_tail}")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        if not self.exited.done():
            self.exited.set_result(outcome)

    async def _read_replies(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # death is the watcher's business
            while True:
                reply = await read_frame(self._reader)
                self._lines.heard.add(0)
                future = self._waiting.get(reply.id)
                if future is not None and not future.done():
                    future.set_result(reply)


async def launch(
    *,
    cell: int,
    config: RunConfig,
    run_dir: Path,
    log_path: Path,
    device: str = "cpu",
    host: str = "127.0.0.1",
    trains: bool = True,
) -> TrainerHandle:
    """Start the tp*pp*cp workers of a cell and wait for their Hello (at most config.cells.start_timeout_s).

    Not `trains`: one process that can only Pull and Refit (receiver.py), for a standalone engine.
    `device`: "cpu" or "cuda" (resolve "auto" before). `host`: the address under which other cells reach this one
    (TCP store, gloo, Transfer Engine). Raises TrainerStartError with the end of the log."""
    cells = config.cells
    world = cells.tensor_parallel * cells.pipeline_parallel * cells.context_parallel if trains else 1
    log_path.parent.mkdir(parents=True, exist_ok=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    config_path = run_dir / f"trainer-{cell}.json"
    config_path.write_bytes(msgspec.json.encode(config))
    lines = Lines(world)
    with tempfile.TemporaryDirectory(prefix="gyre-trainer-") as folder:  # short: socket paths end at 107 bytes
        path = f"{folder}/s"
        server = await asyncio.start_unix_server(lines.accept, path)
        processes: list[asyncio.subprocess.Process] = []
        try:
            command = _command(WORKER if trains else RECEIVER, path, config_path, world, cell, device, host)
            environment = _environment(config, device, host)
            with log_path.open("ab") as log:
                for rank in range(world):
                    processes.append(await _spawn(command, rank, environment, log))
            reader, writer, hello = await _hello(lines, processes, cells.start_timeout_s, log_path, cell)
        except BaseException:
            await _kill(processes)
            raise
        finally:
            server.close()
    return TrainerHandle(cell, log_path, processes, lines, reader, writer, hello)


def _command(module: str, path: str, config_path: Path, world: int, cell: int, device: str, host: str) -> list[str]:
    port = _free_port() if world > 1 else 0
    values = {"socket": path, "config": config_path, "world": world, "master-port": port, "cell": cell}
    values |= {"device": device, "host": host}
    arguments = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    return [sys.executable, "-m", module, *arguments]


async def _spawn(
    command: list[str], rank: int, environment: dict[str, str], log: IO[bytes]
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        "--rank",
        str(rank),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        cwd=REPOSITORY,
        start_new_session=True,  # Ctrl-C reaches the agent, which then leaves in order
    )


def _environment(config: RunConfig, device: str, host: str) -> dict[str, str]:
    environment = dict(os.environ)
    threads = str(config.cells.threads)
    environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment["PYTHONUNBUFFERED"] = "1"
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if host == "127.0.0.1":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


async def _hello(
    lines: Lines,
    processes: list[asyncio.subprocess.Process],
    timeout_s: float,
    log_path: Path,
    cell: int,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, protocol.Hello]:
    async def greet() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, protocol.Hello]:
        reader, writer, reply = await lines.greeting()
        if not isinstance(reply, protocol.Hello):
            raise TrainerStartError(f"trainer of cell {cell} cannot start: {getattr(reply, 'reason', reply)}")
        return reader, writer, reply

    greeting = asyncio.create_task(greet())
    deaths = [asyncio.create_task(p.wait()) for p in processes]
    done, _ = await asyncio.wait([greeting, *deaths], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if greeting in done or (done and (await asyncio.wait([greeting], timeout=1.0))[0]):  # a last Failed may be queued
        for death in deaths:
            death.cancel()
        return greeting.result()
    greeting.cancel()
    why = f"did not answer within {timeout_s:.0f} s" if not done else "ended while starting"
    raise TrainerStartError(f"trainer of cell {cell} {why}; end of {log_path}:\n{log_tail(log_path)}")


async def _kill(processes: list[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    await asyncio.gather(*(p.wait() for p in processes))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
