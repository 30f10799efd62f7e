"""One cell's rollout engine: an SGLang server as a child process, from start to the last trace of it.

Invariant: while an `Engine` exists its server answered /health at least once with the model loaded; after `stop`, after
a failed `start`, and after the death of the agent (see launch.py) no process of it is left. Its temporary files live in
one scratch folder that `stop` removes, and that the next `start` of the cell removes if the agent was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from services.cell_agent.engine import live_calls
from services.cell_agent.engine.kv.wire import HOST_ENV, SECRET_ENV, STALE_ENV
from services.cell_agent.logs import log_tail
from shared.config import RunConfig

REPOSITORY = Path(__file__).resolve().parents[3]
HEALTH_POLL_S = 0.25
HEALTH_TIMEOUT_S = 20.0
CALLS_PER_EXECUTION = 2  # sub-agents and summaries run beside the main call
LISTENING_PORTS = range(20000, 32000)
TOKEN_COUNTER = "sglang:generation_tokens_total{"
KEEP_ALIVE_S = "75"
"""The engine closes a connection that is idle so long: later than any client of ours, which would meet the closing of
one that it is about to use (a request that is lost so cannot just be sent again)."""
KV_TRANSFER_TIMEOUT_S = "5"  # the least that Mooncake takes
REQUEST = aiohttp.ClientTimeout(total=10.0)


class EngineFailed(RuntimeError):
    """The server cannot start, died, or does not answer. `log_tail`: the end of its log."""

    def __init__(self, reason: str, log: Path) -> None:
        self.reason, self.log_tail = reason, log_tail(log)
        super().__init__(f"{reason}\n--- end of {log} ---\n{self.log_tail}")


@dataclass(frozen=True)
class EngineSpec:
    """What one server is started with. `tokens`: KV slots (0 = the engine decides); `device`: "cpu" or "cuda"."""

    cell: int
    model_path: str
    dtype: str
    context: int
    capacity: int  # concurrent executions
    tokens: int
    page: int
    threads: int
    device: str
    seed: int
    tensor_parallel: int = 1
    extra_args: tuple[str, ...] = ()
    start_timeout_s: float = 300.0
    host: str = "127.0.0.1"
    kv_secret: str = ""  # of the run; empty = the engine hands no KV pages over, and cannot keep older ones
    kv_stale: str = "drop"  # what becomes of KV that older weights computed: engine/kv/versions.py


def spec_of(config: RunConfig, cell: int, device: str, kv_secret: str = "") -> EngineSpec:
    """The engine that the run file asks for. On a CPU one process serves; tensor parallelism needs accelerators."""
    cells, model = config.cells, config.model
    return EngineSpec(
        cell=cell,
        model_path=model.path,
        dtype=model.dtype,
        context=model.context,
        capacity=cells.capacity,
        tokens=cells.engine_tokens,
        page=cells.engine_page,
        threads=cells.threads,
        device=device,
        seed=config.seed * 1009 + cell,
        tensor_parallel=cells.tensor_parallel if device == "cuda" else 1,
        extra_args=cells.engine_args,
        start_timeout_s=cells.start_timeout_s,
        kv_secret=kv_secret,
        kv_stale=cells.kv_stale,
    )


def resolve_device(wanted: str) -> str:
    """ "auto" becomes "cuda" where the driver shows a device, else "cpu"."""
    if wanted != "auto":
        return wanted
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "cpu"
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return "cuda" if found else "cpu"


def server_arguments(spec: EngineSpec, port: int, group_port: int) -> list[str]:
    """SGLang's command line. Token ids in, token ids and log-probabilities out: no tokenizer, no grammar."""
    values: dict[str, object] = {
        "model-path": spec.model_path,
        "host": spec.host,
        "port": port,
        "nccl-port": group_port,
        "device": spec.device,
        "dtype": spec.dtype,
        "context-length": spec.context,
        "max-running-requests": spec.capacity * CALLS_PER_EXECUTION,
        "page-size": spec.page,
        "random-seed": spec.seed,
        "weight-version": 0,
        "tp-size": spec.tensor_parallel,
        "grammar-backend": "none",
        "log-level": "warning",
    }
    if spec.tokens:
        values["max-total-tokens"] = spec.tokens
    flags = ["skip-tokenizer-init", "skip-server-warmup", "enable-metrics"]
    if spec.device == "cpu":
        values["attention-backend"] = "torch_native"
        flags += ["disable-overlap-schedule", "sleep-on-idle"]  # an idle engine would burn a whole core
    elif spec.kv_stale == "keep":
        # A pause in place leaves the overlapped pass unread; its tokens would be told to be of the weights after it.
        flags.append("disable-overlap-schedule")
    arguments = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    return [*arguments, *(f"--{flag}" for flag in flags), *spec.extra_args]


class Engine:
    """A running server. `exited` resolves when its main process has ended, asked or not."""

    def __init__(
        self, spec: EngineSpec, port: int, process: asyncio.subprocess.Process, log: Path, scratch: Path
    ) -> None:
        self.spec, self.log = spec, log
        self.url = f"http://{spec.host}:{port}"
        self.version = 0
        self._process, self._scratch = process, scratch
        self._http = aiohttp.ClientSession(base_url=self.url, timeout=REQUEST)
        self._notes = _notes_path(log, spec.cell)
        self._shared_memory: set[Path] = set()
        self.exited: asyncio.Task[int] = asyncio.create_task(process.wait(), name=f"engine-{spec.cell}-exit")

    @classmethod
    async def start(cls, spec: EngineSpec, log: Path) -> Engine:
        """Start and wait until the model answers; EngineFailed with the log's tail if it does not in time."""
        log.parent.mkdir(parents=True, exist_ok=True)
        sweep(_notes_path(log, spec.cell))
        scratch = Path(tempfile.mkdtemp(prefix="gyre-engine-"))  # short: socket paths end at 107 bytes
        port, group_port = free_ports(spec.host, 2)
        command = [sys.executable, "-m", "services.cell_agent.engine.launch", str(os.getpid()), spec.device]
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                *server_arguments(spec, port, group_port),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=_environment(spec, scratch),
                cwd=REPOSITORY,
                start_new_session=True,
            )
        engine = cls(spec, port, process, log, scratch)
        engine._note()  # an agent may be killed while its engine starts, too
        try:
            await engine._until_healthy()
        except BaseException:
            await engine.stop()
            raise
        engine._note()
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self.exited.done()

    async def _until_healthy(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.spec.start_timeout_s
        while not await self.healthy():
            if self.exited.done():
                raise EngineFailed(
                    f"engine of cell {self.spec.cell} ended with exit code {self.exited.result()} while starting",
                    self.log,
                )
            if asyncio.get_running_loop().time() > deadline:
                raise EngineFailed(
                    f"engine of cell {self.spec.cell} did not answer within cells.start_timeout_s = "
                    f"{self.spec.start_timeout_s:.0f} s; raise it if the log shows progress",
                    self.log,
                )
            await asyncio.sleep(HEALTH_POLL_S)

    async def healthy(self) -> bool:
        """True if the scheduler behind the HTTP server produced a token or is busy producing some."""
        try:
            async with self._http.get("/health", timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def live_calls(self) -> int:
        """Calls that run or wait in the engine. Exact when it is 0: the engine reports idleness at once."""
        try:
            async with self._http.get("/v1/loads", params={"include": "core"}) as response:
                response.raise_for_status()
                body = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(
                f"engine of cell {self.spec.cell} does not tell its load ({error!r})", self.log
            ) from error
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in body["loads"])

    async def generated_tokens(self) -> int:
        """Tokens of all finished calls (aborted ones too) since the engine started, by the engine's own counter."""
        try:
            async with self._http.get("/metrics/") as response:
                response.raise_for_status()
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"engine of cell {self.spec.cell} shows no metrics ({error!r})", self.log) from error
        lines = (line for line in text.splitlines() if line.startswith(TOKEN_COUNTER))
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))

    async def post(self, path: str, body: dict[str, object]) -> Any:
        """One control request; its JSON, if it has any. EngineFailed unless it is answered with 200."""
        try:
            async with self._http.post(path, json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise EngineFailed(f"{path} on cell {self.spec.cell} answered {response.status}: {text}", self.log)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"{path} on cell {self.spec.cell} failed ({error!r})", self.log) from error
        return json.loads(text) if text.strip().startswith(("{", "[")) else None

    async def calls(self) -> list[str]:
        """Request ids of the live calls."""
        try:
            async with self._http.get(live_calls.PATH) as response:
                response.raise_for_status()
                body = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(
                f"engine of cell {self.spec.cell} does not list its calls ({error!r})", self.log
            ) from error
        return list(body["calls"])

    async def abort(self, calls: Sequence[str]) -> list[str]:
        """Ask for the end of these calls, which return what they have (finish reason abort). Those that were live."""
        return list((await self.post(f"{live_calls.PATH}/abort", {"calls": list(calls)}))["aborted"])

    async def abort_all(self) -> None:
        """End every live call; each returns what it has, with finish reason abort."""
        await self.post("/abort_request", {"rid": "", "abort_all": True})

    async def stop(self) -> None:
        """Kill the server and its children, remove what they left. SGLang's own way out of SIGTERM waits five
        seconds and saves nothing; live calls must be drained or aborted before."""
        leftovers = self._shared_memory | set(shared_memory_of(self.pid))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self.exited
        await _until_group_gone(self.pid)
        await self._http.close()
        for path in leftovers:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._notes.unlink(missing_ok=True)

    def _note(self) -> None:
        """Say on disk what `sweep` has to remove if this agent is killed."""
        self._shared_memory = set(shared_memory_of(self.pid))
        notes = {"scratch": str(self._scratch), "shared_memory": [str(p) for p in self._shared_memory]}
        self._notes.write_text(json.dumps(notes))


def sweep(notes: Path) -> None:
    """Remove the files of an engine whose agent was killed (its processes died with it)."""
    if notes.exists():
        left = json.loads(notes.read_text())
        for path in left["shared_memory"]:
            Path(path).unlink(missing_ok=True)
        shutil.rmtree(left["scratch"], ignore_errors=True)
        notes.unlink()


def shared_memory_of(group: int) -> list[Path]:
    """Files under /dev/shm that the processes of `group` hold open (SGLang never unlinks its load reports)."""
    found: set[Path] = set()
    for pid in members_of(group):
        with contextlib.suppress(OSError):
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = handle.readlink()
                    if target.is_relative_to("/dev/shm") and target.exists():
                        found.add(target)
    return sorted(found)


def members_of(group: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[2]) == group and fields[0] != "Z":
                    members.append(int(entry.name))
    return members


async def _until_group_gone(group: int) -> None:
    while members_of(group):
        await asyncio.sleep(0.02)


def free_ports(host: str, count: int) -> list[int]:
    """Ports that were free a moment ago, all different. They lie below the range from which the system gives ports to
    outgoing connections: an engine listens only seconds later, and one of those would take its port meanwhile."""
    found: list[int] = []
    while len(found) < count:
        port = secrets.choice(LISTENING_PORTS)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            if port not in found:
                found.append(port)
    return found


def _notes_path(log: Path, cell: int) -> Path:
    return log.parent / f".engine-{cell}.json"


def _environment(spec: EngineSpec, scratch: Path) -> dict[str, str]:
    environment = dict(os.environ)
    threads = str(spec.threads)
    environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TMPDIR": str(scratch)}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    environment["SGLANG_TIMEOUT_KEEP_ALIVE"] = KEEP_ALIVE_S
    if spec.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if spec.kv_secret:
        environment |= {SECRET_ENV: spec.kv_secret, STALE_ENV: spec.kv_stale, HOST_ENV: spec.host}
        environment["MC_TRANSFER_TIMEOUT"] = KV_TRANSFER_TIMEOUT_S
        if spec.device == "cpu":
            environment["MC_FORCE_TCP"] = "1"
    return environment
