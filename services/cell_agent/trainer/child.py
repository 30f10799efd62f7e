"""What every process that a cell agent starts has in common: it ends with its agent, and talks to it in frames.

Frames: 4-byte little-endian length, then the message (protocol.py).
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time

import msgspec

from services.cell_agent.trainer import protocol
from shared.parent import die_with_parent

ALIVE_EVERY_S = 2.0
_sending = threading.Lock()  # whole frames; a process has one connection


def end_with_parent() -> None:
    """End this process when its parent ends: at once on Linux, within a second elsewhere."""
    parent = os.getppid()
    die_with_parent()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(3)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def parser(description: str) -> argparse.ArgumentParser:
    """The command line that launcher.py writes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--socket", required=True, help="the agent's unix socket")
    parser.add_argument("--config", required=True, help="resolved run configuration, JSON")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--master-port", type=int, default=0)
    parser.add_argument("--cell", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--host", default="127.0.0.1", help="address under which other cells reach this one")
    parser.add_argument("--transfer", choices=("tcp", "rdma"), default=os.environ.get("GYRE_TRANSFER", "tcp"))
    return parser


def connect(path: str) -> socket.socket:
    """The agent's unix socket at `path`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    return connection


def write_frame(connection: socket.socket, message: protocol.Reply) -> None:
    data = msgspec.msgpack.encode(message)
    with _sending:
        connection.sendall(len(data).to_bytes(4, "little") + data)


def show_life(connection: socket.socket, rank: int = 0) -> None:
    """From now on (of rank 0 the agent expects Hello first) tell it every few seconds that this process runs: one that
    is stopped, or whose machine hangs, closes no connection."""

    def beat() -> None:
        while True:
            try:
                write_frame(connection, protocol.Alive(id=0, rank=rank))
            except OSError:
                return  # the agent has gone
            time.sleep(ALIVE_EVERY_S)

    threading.Thread(target=beat, name="sign-of-life", daemon=True).start()


def read_frame(connection: socket.socket) -> bytes | None:
    """One frame, or None when the agent has gone."""
    head = _read_exactly(connection, 4)
    return None if head is None else _read_exactly(connection, int.from_bytes(head, "little"))


def _read_exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(size - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
