"""Mooncake's Transfer Engine behind one strict wrapper.

Owns the engine of this process and what is registered with it. Invariants: only memory registered here is read into
(the engine itself would accept any address); a read returns only when all bytes have arrived; every failure is an
exception that names peer and cause. Listeners accept anyone who reaches them, so they belong on a private network, and
only snapshots are registered for reading.

Measured facts behind the limits: batches of more than 1,024 requests fail. The engine's blocking calls ask for the
state without a pause, a whole core for each; `transfer_check_status` looks at the first request of a batch only. So
each request is a batch of its own, and is looked at now and then. A stopped peer is noticed after MC_TRANSFER_TIMEOUT
(5 s at least), by our own clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

REQUEST_BYTES = 4 << 20
REQUESTS_AT_ONCE = 1024
RATE = 1e9  # bytes a second: a read may take that long beside the timeout
FIRST_LOOK_S, LOOK_S, LOOK_LATE_S = 5e-5, 5e-4, 0.25
RUNNING, ARRIVED = 0, 1  # what transfer_check_status tells; the rest is failure
NO_BATCH = (0, -1, 2**64 - 1)
INFINIBAND = Path("/sys/class/infiniband")


class TransferError(Exception):
    """Base of all failures of the Transfer Engine."""


class TransferUnavailable(TransferError):
    """The engine cannot be started with the wanted protocol on this machine."""


class NotRegistered(TransferError):
    """A buffer was used that is not registered, or not for so many bytes."""


class PeerUnreachable(TransferError):
    """The owner of the memory did not deliver: it is gone, hangs, or no longer offers that memory. `late`: requests
    that may still write into the buffers (TransferSession.until_quiet)."""

    def __init__(self, message: str, late: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.late = late


class Piece(NamedTuple):
    """`nbytes` at `address` of the peer go to `offset` in the registered buffer `into`."""

    address: int
    into: torch.Tensor
    offset: int
    nbytes: int


class TransferSession:
    """One Transfer Engine. `address` ("host:port") is what peers need to reach it."""

    def __init__(self, host: str, protocol: str = "tcp", timeout_s: float = 10.0) -> None:
        if protocol == "rdma" and not (INFINIBAND.is_dir() and any(INFINIBAND.iterdir())):
            raise TransferUnavailable(f"rdma was asked for but {INFINIBAND} lists no adapter; use tcp")
        self._timeout_s = float(os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(max(5, round(timeout_s)))))
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("GLOG_minloglevel", "2")
        if host in ("127.0.0.1", "localhost"):
            os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise TransferUnavailable(
                f"mooncake-transfer-engine cannot be loaded: {error}; run `gyre doctor`"
            ) from error
        self._engine: Any = TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if code != 0:
            raise TransferUnavailable(f"Transfer Engine did not start on {host} with {protocol} (code {code})")
        self.address = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: dict[int, torch.Tensor] = {}

    def register(self, buffer: torch.Tensor) -> None:
        """Let peers read and this process receive into `buffer` (contiguous uint8, kept alive until unregistered)."""
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise NotRegistered("only contiguous uint8 buffers can be registered")
        code = self._engine.register_memory(buffer.data_ptr(), buffer.nbytes)
        if code != 0:
            raise TransferError(f"registering {buffer.nbytes} bytes failed (code {code})")
        self._registered[buffer.data_ptr()] = buffer

    def unregister(self, buffer: torch.Tensor) -> None:
        if self._registered.pop(buffer.data_ptr(), None) is None:
            raise NotRegistered("this buffer is not registered")
        code = self._engine.unregister_memory(buffer.data_ptr())
        if code != 0:
            raise TransferError(f"unregistering {buffer.nbytes} bytes failed (code {code})")

    def read(self, peer: str, address: int, into: torch.Tensor, nbytes: int) -> None:
        """Copy `nbytes` from `address` in the process at `peer` into a registered buffer. Blocks without the GIL."""
        self.read_pieces(peer, [Piece(address, into, 0, nbytes)])

    def read_pieces(self, peer: str, pieces: Sequence[Piece]) -> int:
        """Copy scattered pieces from the process at `peer`; returns the bytes. Blocks without the GIL."""
        local: list[int] = []
        remote: list[int] = []
        sizes: list[int] = []
        for piece in _joined(pieces):
            start = piece.into.data_ptr()
            known = self._registered.get(start)
            if known is None or piece.offset < 0 or piece.offset + piece.nbytes > min(known.nbytes, piece.into.nbytes):
                raise NotRegistered(f"a receiving buffer is not registered for {piece.offset}+{piece.nbytes} bytes")
            offset = piece.offset
            for size in _requests(piece.nbytes):
                local.append(start + offset)
                remote.append(piece.address + offset - piece.offset)
                sizes.append(size)
                offset += size
        for i in range(0, len(sizes), REQUESTS_AT_ONCE):
            window = slice(i, i + REQUESTS_AT_ONCE)
            self._read_window(peer, local[window], remote[window], sizes[window])
        return sum(sizes)

    def _read_window(self, peer: str, local: list[int], remote: list[int], sizes: list[int]) -> None:
        limit_s = self._timeout_s + sum(sizes) / RATE
        ends = time.monotonic() + limit_s
        running: list[int] = []
        refused = False
        for request in zip(local, remote, sizes, strict=True):
            batch = self._engine.batch_transfer_async_read(peer, *([field] for field in request))
            if batch in NO_BATCH:
                refused = True
                break
            running.append(batch)
        states = [self._ended(batch, ends) for batch in running]
        late = tuple(batch for batch, state in zip(running, states, strict=True) if state == RUNNING)
        if late:
            raise PeerUnreachable(
                f"{peer} did not deliver {sum(sizes)} bytes within {limit_s:.1f} s: it hangs, or the link is too slow",
                late,
            )
        if refused or any(state != ARRIVED for state in states):
            raise PeerUnreachable(
                f"reading {sum(sizes)} bytes from {peer} failed: its process is gone, or it no longer offers that "
                "memory; wait for what it, or another process, publishes next"
            )

    def _ended(self, batch: int, ends: float) -> int:
        """Wait for a request; its last known state."""
        pause = FIRST_LOOK_S
        while (state := int(self._engine.transfer_check_status(batch))) == RUNNING and time.monotonic() < ends:
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S)
        return state

    def until_quiet(self, late: Sequence[int]) -> None:
        """Block until none of the requests that a PeerUnreachable names can write into its buffer any more. A peer that
        hangs may keep them open as long as its process exists."""
        for batch in late:
            while int(self._engine.transfer_check_status(batch)) == RUNNING:
                time.sleep(LOOK_LATE_S)

    def close(self) -> None:
        for buffer in list(self._registered.values()):
            self.unregister(buffer)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours that lie side by side here and there become one: a request has a cost of its own."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.into is piece.into
            and (last.address + last.nbytes, last.offset + last.nbytes) == (piece.address, piece.offset)
        ):
            joined[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
        else:
            joined.append(piece)
    return joined


def _requests(nbytes: int) -> list[int]:
    """Sizes of the requests that cover `nbytes`."""
    whole, rest = divmod(nbytes, REQUEST_BYTES)
    return [REQUEST_BYTES] * whole + ([rest] if rest else [])


Reader = Callable[[str, Sequence[Piece]], int]  # TransferSession.read_pieces, or a scripted counterpart in a test
