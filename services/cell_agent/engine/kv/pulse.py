"""Proof that a peer's scheduler process is alive and of this run, asked for before the Transfer Engine is.

Why: the first contact of Mooncake 0.3.13 with a peer that is stopped blocks for two minutes under a lock that all other
transfers need (measured); after a first contact, a stopped peer costs MC_TRANSFER_TIMEOUT and nobody else waits.
The answer is an HMAC of the question under the run's secret, so a stranger on that port is noticed, too.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import socketserver
import threading

from services.cell_agent.engine.kv.errors import KvTransferFailed

NONCE_BYTES = 16
TIMEOUT_S = 2.0


def _answer(secret: str, nonce: bytes, session: str) -> bytes:
    return hmac.new(secret.encode(), nonce + session.encode(), hashlib.sha256).digest()


class PulseServer:
    """Answers in a thread of this process. `address`: where."""

    def __init__(self, host: str, secret: str, session: str) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.settimeout(TIMEOUT_S)
                nonce = _receive(self.request, NONCE_BYTES)
                if nonce:
                    self.request.sendall(_answer(secret, nonce, session))

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server((host, 0), Handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="kv-pulse", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def check(address: str, secret: str, session: str, timeout_s: float = TIMEOUT_S) -> None:
    """Raises KvTransferFailed unless the process behind `address` is alive, of this run, and owns `session`."""
    host, _, port = address.rpartition(":")
    nonce = os.urandom(NONCE_BYTES)
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(nonce)
            answer = _receive(connection, hashlib.sha256().digest_size)
    except OSError as error:
        raise KvTransferFailed(f"the source at {address} gives no sign of life ({error!r})") from error
    if not hmac.compare_digest(answer, _answer(secret, nonce, session)):
        raise KvTransferFailed(f"what answers at {address} is not the lease's source")


def _receive(connection: socket.socket, size: int) -> bytes:
    """`size` bytes, or b"" if the peer hung up before."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return b""
        data += part
    return data
