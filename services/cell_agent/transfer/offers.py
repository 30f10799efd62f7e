"""Cells tell each other which chunks of which snapshot they hold, so that they can read them from each other.

One small TCP server in each cell's control rank; who pulls a snapshot asks every other cell for it by its digest, and
hears at once, whenever something changed, and twice a second in any case. That is also the sign of life without which
no peer is read from: the first contact of Mooncake with a stopped process blocks all transfers for two minutes
(measured). Invariant: what is offered is verified and stays in its buffer until `withdraw`; a reader verifies it again
all the same.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

log = logging.getLogger("gyre.offers")

HEARTBEAT_S = 0.5
SILENCE_S = 2.0  # a peer of which nothing is heard for so long is read from no more
LEAST_GAP_S = 0.005  # between two reports to one listener
MAX_FRAME = 1 << 20

Flags = npt.NDArray[np.bool_]


class Ask(msgspec.Struct, frozen=True):
    digest: str


class Offer(msgspec.Struct, frozen=True):
    """What a cell has of the snapshot that was asked for. `has`: packed bits, one a chunk; empty = it has none of it.

    session, address: where its copy can be read. pulling: more chunks follow."""

    cell: int
    session: str
    address: int = 0
    has: bytes = b""
    pulling: bool = False

    def flags(self, count: int) -> Flags:
        if not self.has:
            return np.zeros(count, dtype=np.bool_)
        return np.unpackbits(np.frombuffer(self.has, dtype=np.uint8), count=count).astype(np.bool_)


@dataclass
class _Copy:
    address: int
    has: Flags
    pulling: bool
    changes: int = 0


class Offers:
    """The server. `address`: where it listens ("host:port"). Used by the puller's threads and its own."""

    def __init__(self, host: str, cell: int, session: str) -> None:
        self._cell, self._session = cell, session
        self._copies: dict[str, _Copy] = {}
        self._changed = threading.Condition()
        self._changes = 0
        self._closed = False
        offers = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                offers._report(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server((host, 0), Handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="offers", daemon=True).start()

    def hold(self, digest: str, address: int, has: Flags, pulling: bool) -> None:
        """Offer a copy: whole (published here), or one that `add` fills."""
        self._change(digest, _Copy(address, has.copy(), pulling))

    def add(self, digest: str, chunk: int) -> None:
        with self._changed:
            if digest in self._copies:
                self._copies[digest].has[chunk] = True
                self._tick()

    def complete(self, digest: str) -> None:
        with self._changed:
            if digest in self._copies:
                self._copies[digest].pulling = False
                self._tick()

    def withdraw(self, digest: str) -> None:
        self._change(digest, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._tick()
        self._server.shutdown()
        self._server.server_close()

    def _change(self, digest: str, copy: _Copy | None) -> None:
        with self._changed:
            self._copies.pop(digest, None)
            if copy is not None:
                self._copies[digest] = copy
            self._tick()

    def _tick(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _offer(self, digest: str) -> Offer:
        copy = self._copies.get(digest)
        if copy is None:
            return Offer(self._cell, self._session)
        return Offer(self._cell, self._session, copy.address, np.packbits(copy.has).tobytes(), copy.pulling)

    def _report(self, connection: socket.socket) -> None:
        connection.settimeout(SILENCE_S)
        try:
            digest = msgspec.msgpack.decode(receive(connection), type=Ask).digest
            seen = -1
            while not self._closed:
                with self._changed:
                    self._changed.wait_for(lambda: self._changes != seen, timeout=HEARTBEAT_S)  # noqa: B023
                    seen, offer = self._changes, self._offer(digest)
                send(connection, offer)
                time.sleep(LEAST_GAP_S)
        except (OSError, msgspec.DecodeError) as error:  # the listener has what it wanted, or is none of ours
            log.debug("a listener left: %r", error)


class Listener:
    """Hears one peer's offers of one snapshot, in a thread, until `close` or until it hears nothing any more: then
    `on_gone` is told which cell that was, if it is known."""

    def __init__(
        self, peer: str, digest: str, on_offer: Callable[[Offer], None], on_gone: Callable[[int], None]
    ) -> None:
        self._peer, self._digest, self._on_offer, self._on_gone = peer, digest, on_offer, on_gone
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name=f"offers of {peer}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True

    def _listen(self) -> None:
        host, _, port = self._peer.rpartition(":")
        offer: Offer | None = None
        try:
            with socket.create_connection((host, int(port)), timeout=SILENCE_S) as connection:
                connection.settimeout(SILENCE_S)
                send(connection, Ask(self._digest))
                while not self._closed:
                    offer = msgspec.msgpack.decode(receive(connection), type=Offer)
                    self._on_offer(offer)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            if not self._closed:
                log.warning("no more offers from the cell at %s: %r", self._peer, error)
        if offer is not None:
            self._on_gone(offer.cell)


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(4, "little") + data)


def receive(connection: socket.socket) -> bytes:
    """One frame; OSError if the other side hangs up, is silent, or sends something else."""
    size = int.from_bytes(_exactly(connection, 4), "little")
    if size > MAX_FRAME:
        raise ConnectionError(f"a frame of {size} bytes: not one of ours")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the other side hung up")
        parts += part
    return bytes(parts)
