"""What must be true before a run starts, beyond the run file itself: a sandbox that works, a harness that is there.

Invariant: nothing of the run has been made when one of these refuses; what can be installed is installed and said.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console

from services.harness import setup
from services.harness.profiles import HarnessMissing, profile
from shared.bus import Bus
from shared.config import RunConfig
from shared.sandbox import find

REACH_S = 10.0


class NoServer(RuntimeError):
    """The NATS server that the run file names does not answer."""


class PortTaken(RuntimeError):
    """The port that the run file gives the proxy belongs to somebody else."""


async def check(config: RunConfig, console: Console) -> None:
    """Raises SandboxMissing, HarnessMissing, SetupFailed or NoServer, each with the fix."""
    with tempfile.TemporaryDirectory(prefix="gyre-preflight-") as scratch:
        await find(Path(scratch))
    _harness(config, console)
    _port(config.proxy.port)
    if config.bus.url:
        try:
            bus = await asyncio.wait_for(Bus.connect(config.bus.url, "preflight", "control"), REACH_S)
        except TimeoutError as error:
            raise NoServer(
                f"bus.url {config.bus.url} did not answer in {REACH_S:.0f} s: start it, or leave bus.url out"
            ) from error
        await bus.close()


def _port(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PortTaken(
                f"proxy.port {port} cannot be used ({error.strerror}): free it, or leave proxy.port at 0"
            ) from error


def _harness(config: RunConfig, console: Console) -> None:
    harness = config.harness
    if not harness.command and harness.name in setup.PACKAGES and not setup.is_complete(harness.name):
        console.print(f"installing the harness {harness.name} (once, about a minute)", markup=False)
        setup.install(harness.name)
    if harness.setup:
        console.print(f"preparing the harness: {harness.setup}", markup=False)
        done = subprocess.run(["/bin/sh", "-c", harness.setup], capture_output=True, text=True, check=False)
        if done.returncode:
            raise HarnessMissing(
                f"harness.setup ended with code {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
            )
    profile(harness)
