"""The processes of one sandbox, from outside: pipes, signals, the end.

Owns the descriptors and the wait status of one bubblewrap process. Bubblewrap (with --as-pid-1) ends only after
process 1 of the sandbox ended, and that only after the kernel ended every other process in it. Process 1 has our
control socket as its standard input. It reports there that it lives; from then on it dies with us: a supervisor when
the socket closes, the shell of an unsupervised command, which waits there for a "go", by its parent's death signal.

Invariant: `ended` resolves exactly once, after the last process is gone and its output has been handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OUTPUT_TAIL = 2000  # bytes of output that an error message may quote
STRIKE_EVERY_S = 0.05


class SandboxFailed(RuntimeError):
    """This sandbox did not get as far as running its command."""


@dataclass(frozen=True)
class Ended:
    """How a sandbox ended. `code` is None when a signal ended the command; `stopped` when its time limit did.
    `cpu_seconds` is that of all its processes."""

    code: int | None
    signal: int
    stopped: bool
    seconds: float
    cpu_seconds: float


class Running:
    """One sandbox. Everything happens on the event loop that made it."""

    def __init__(self, output: Callable[[bytes], None] | None, supervised: bool) -> None:
        self.supervised = supervised
        self._loop = asyncio.get_running_loop()
        self._output = output
        self._tail = b""
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._started_at = time.monotonic()
        self._confirmed: asyncio.Future[bool] = self._loop.create_future()
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._report: dict[str, Any] = {}
        self._line = b""
        self._out, out = os.pipe()
        os.set_blocking(self._out, False)
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        self._theirs = [theirs.detach(), out]  # descriptors that the sandbox inherits

    # ------------------------------------------------------------------------------------------------------ start

    def data_fd(self, text: str) -> int:
        """A descriptor from which bubblewrap reads `text` (short: it must fit a pipe)."""
        read, write = os.pipe()
        os.write(write, text.encode())
        os.close(write)
        self._theirs.append(read)
        return read

    def spawn(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start bubblewrap. Raises OSError."""
        control, out, *passed = self._theirs
        self._process = subprocess.Popen(
            command, stdin=control, stdout=out, stderr=out, pass_fds=passed, env=dict(env), cwd="/"
        )
        self._close_theirs()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._out, self._read_output)
        self._loop.add_reader(self._pidfd, self._reap)
        self._loop.add_reader(self._control, self._read_control)

    async def confirm(self) -> None:
        """Wait until the command runs inside the sandbox. Raises SandboxFailed with the reason."""
        if await self._confirmed:
            if not self.supervised:
                self._send(b"go\n")
            return
        await self.kill()
        reason = self._report.get("error") or self._tail.decode("utf-8", "replace").strip() or "no reason given"
        raise SandboxFailed(f"the sandbox's command did not start: {reason}")

    def abandon(self) -> None:
        """Let go of a sandbox that never started."""
        self._close_theirs()
        if self._process is None:
            self._close_ours()

    # -------------------------------------------------------------------------------------------------------- end

    async def wait(self, limit_s: float | None = None, grace_s: float = 0.0) -> Ended:
        """Until nothing is left of the sandbox. After `limit_s` the command gets SIGTERM (if supervised), `grace_s`
        later everything is killed."""
        await asyncio.wait([self._ended], timeout=limit_s)
        if self._ended.done():
            return self._ended.result()
        self._stopped = True
        if self.supervised and grace_s > 0:
            self.send(signal.SIGTERM)
            await asyncio.wait([self._ended], timeout=grace_s)
        return await self.kill()

    def send(self, number: signal.Signals) -> None:
        """Signal the command's process group."""
        if self.supervised:
            self._send(bytes([number]))

    def _send(self, data: bytes) -> None:
        if not self._ended.done():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has just ended
                self._control.send(data)

    async def kill(self) -> Ended:
        """End everything at once; returns when nothing is left."""
        if self._process is None:
            self.abandon()
            return Ended(None, signal.SIGKILL, self._stopped, 0.0, 0.0)
        while not self._ended.done():
            self._strike(self._process.pid)
            await asyncio.wait([self._ended], timeout=STRIKE_EVERY_S)
        return self._ended.result()

    def _strike(self, bwrap: int) -> None:
        """Process 1 of the sandbox is bubblewrap's child: with it the kernel ends all others. Without such a child
        (not yet, or no longer) bubblewrap itself is the target."""
        try:
            with open(f"/proc/{bwrap}/task/{bwrap}/children") as file:
                children = [int(pid) for pid in file.read().split()]
            for pid in children or [bwrap]:
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            pass  # it has just ended

    # ---------------------------------------------------------------------------------------------- event handlers

    def _read_output(self) -> bool:
        """Hand over what there is; False at the end of the output."""
        try:
            data = os.read(self._out, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._out)
            return False
        self._tail = (self._tail + data)[-OUTPUT_TAIL:]
        if self._output is not None:
            self._output(data)
        return True

    def _read_control(self) -> None:
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._report.update(json.loads(line))
        if not data:
            self._loop.remove_reader(self._control)
        if not self._confirmed.done() and ("started" in self._report or "error" in self._report or not data):
            self._confirmed.set_result("started" in self._report)

    def _reap(self) -> None:
        assert self._process is not None
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        self._read_control()
        while self._read_output():
            pass
        self._close_ours()
        if not self._confirmed.done():
            self._confirmed.set_result(False)
        self._ended.set_result(self._result(code, usage.ru_utime + usage.ru_stime))

    def _result(self, code: int, cpu_seconds: float) -> Ended:
        """`code` is bubblewrap's: 128 + signal number for a command that a signal ended."""
        seconds = time.monotonic() - self._started_at
        if "exit" in self._report:
            number = int(self._report["signal"])
            return Ended(None if number else int(self._report["exit"]), number, self._stopped, seconds, cpu_seconds)
        number = -code if code < 0 else code - 128 if code > 128 else 0
        return Ended(None if number else code, number, self._stopped, seconds, cpu_seconds)

    def _close_theirs(self) -> None:
        for fd in self._theirs:
            os.close(fd)
        self._theirs = []

    def _close_ours(self) -> None:
        for fd in (self._out, self._pidfd):
            if fd >= 0:
                self._loop.remove_reader(fd)
                os.close(fd)
        self._loop.remove_reader(self._control)
        self._control.close()
