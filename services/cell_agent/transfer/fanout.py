"""One cell's pull of a snapshot from the origin and from other cells that pull or hold it: swarm.py with threads.

Invariants: a chunk counts as here, and is offered to others, only after its digest was verified; what a peer sends goes
through a buffer of its reader, so a peer that hangs neither holds up the pull nor touches the snapshot, and a buffer
whose read failed is never used again (the transport may write into it later); `run` returns or raises only when nothing
is written into the snapshot's buffer any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.cell_agent.transfer.chunks import Chunks, digest_at, digest_of
from services.cell_agent.transfer.mooncake import Piece, Reader, TransferError, TransferSession
from services.cell_agent.transfer.offers import Listener, Offer, Offers
from services.cell_agent.transfer.swarm import ORIGIN, Swarm

log = logging.getLogger("gyre.fanout")

ORIGIN_READERS = 2  # in turn: while one verifies, the other reads
PEER_READERS = 6
ALONE = 32  # chunks per request where nobody waits for what this cell passes on: a request has a cost of its own
LOOK_AGAIN_S = 0.02


class DamagedChunk(Exception):
    """The origin's bytes are not those of its snapshot."""


@dataclass(frozen=True)
class Wanted:
    """origin: (session, address) of the core's copy; peers: addresses of other cells' Offers, the core's not among
    them; digests: of the chunks; digest: the snapshot's name; into: registered buffer of that size."""

    origin: tuple[str, int]
    peers: Sequence[str]
    digest: str
    digests: bytes = field(repr=False)
    chunks: Chunks
    into: Tensor = field(repr=False)


@dataclass
class Report:
    """Of one pull. seconds: until the last chunk was verified; verify_s: in all readers together."""

    seconds: float = 0.0
    verify_s: float = 0.0
    origin_bytes: int = 0
    peer_bytes: int = 0
    sources: int = 0  # that delivered something
    lost_sources: int = 0

    def metrics(self) -> dict[str, float]:
        """As the trainer protocol tells them."""
        return {
            "pull_s": self.seconds,
            "verify_s": self.verify_s,
            "core_bytes": float(self.origin_bytes),
            "cell_bytes": float(self.peer_bytes),
            "sources": float(self.sources),
            "lost_sources": float(self.lost_sources),
        }


class Pull:
    """One use. `abandoned` gets the buffers that must never be used again."""

    def __init__(
        self,
        session: TransferSession,
        offers: Offers | None,
        cell: int,
        wanted: Wanted,
        abandoned: list[Tensor],
        read: Reader | None = None,
    ) -> None:
        self._session, self._offers, self._wanted, self._abandoned = session, offers, wanted, abandoned
        self._read = read or session.read_pieces
        self._at_once = 1 if wanted.peers else ALONE
        self._swarm = Swarm(cell, wanted.chunks.count, ORIGIN_READERS * self._at_once)
        self._where = {ORIGIN: wanted.origin}
        self._delivered: set[int] = set()
        self._reading: dict[int, tuple[int, object]] = {}  # chunk -> source and reader
        self._writing = 0  # readers that write into the snapshot's buffer
        self._state = threading.Condition()
        self._at_origin = threading.Lock()  # two requests at once would only get in each other's way
        self._error: Exception | None = None
        self._report = Report()

    def run(self) -> Report:
        """Raises TransferError (the origin does not deliver) or DamagedChunk."""
        started = time.perf_counter()
        wanted = self._wanted
        listeners = [Listener(peer, wanted.digest, self._heard, self._gone) for peer in wanted.peers]
        for origin_first in [True] * ORIGIN_READERS + [False] * (PEER_READERS if wanted.peers else 0):
            threading.Thread(target=self._reader, args=(origin_first,), name="pull", daemon=True).start()
        with self._state:
            self._state.wait_for(lambda: (self._error is not None or self._swarm.complete) and self._writing == 0)
            self._reading.clear()  # who reads from a peer that hangs reads in vain
        for listener in listeners:
            listener.close()
        if self._error is not None:
            raise self._error
        report = self._report
        report.seconds, report.sources = time.perf_counter() - started, len(self._delivered)
        report.lost_sources = len(self._swarm.failed)
        return report

    # --------------------------------------------------------------------------------------------- what peers say

    def _heard(self, offer: Offer) -> None:
        with self._state:
            self._where[offer.cell] = (offer.session, offer.address)
            self._swarm.peer_has(offer.cell, offer.flags(self._wanted.chunks.count), offer.pulling)
            self._state.notify_all()

    def _gone(self, cell: int) -> None:
        with self._state:
            self._read_elsewhere(cell)

    # ---------------------------------------------------------------------------------------------------- reading

    def _reader(self, origin_first: bool) -> None:
        staging: Tensor | None = None
        try:
            while (task := self._next(origin_first)) is not None:
                source, chunks, where, claim = task
                if source == ORIGIN:
                    self._from_origin(chunks, where)
                    continue
                (chunk,) = chunks
                if staging is None:
                    staging = torch.empty(self._wanted.chunks.size, dtype=torch.uint8)
                    self._session.register(staging)
                if not self._from_peer(source, chunk, where, claim, staging):
                    self._abandoned.append(staging)
                    staging = None
        except (TransferError, DamagedChunk) as error:
            self._fail(error)
        except Exception as error:  # a fault of ours must reach who pulls
            log.exception("pulling a snapshot failed")
            self._fail(error)
        finally:
            if staging is not None:
                self._session.unregister(staging)

    def _fail(self, error: Exception) -> None:
        with self._state:
            if self._error is None or isinstance(error, TransferError):  # after which the buffer may still be written
                self._error = error
            self._state.notify_all()

    def _next(self, origin_first: bool) -> tuple[int, list[int], tuple[str, int], object] | None:
        """(source, chunks, where, claim on them); None: the pull is over. Several chunks only if nobody else pulls."""
        with self._state:
            while self._error is None and not self._swarm.complete:
                found: list[tuple[int, int]] = []
                while len(found) < self._at_once and (
                    one := self._swarm.next(time.monotonic(), origin_first=origin_first)
                ):
                    found.append(one)
                if found:
                    source, chunks, claim = found[0][0], [chunk for _, chunk in found], object()
                    self._reading.update(dict.fromkeys(chunks, (source, claim)))
                    self._writing += source == ORIGIN
                    return source, chunks, self._where[source], claim
                self._state.wait(LOOK_AGAIN_S)
        return None

    def _from_origin(self, chunks: list[int], where: tuple[str, int]) -> None:
        wanted = self._wanted
        session, address = where
        spans = [wanted.chunks.span(chunk) for chunk in chunks]
        try:
            with self._at_origin:
                if self._error is not None:
                    return
                started = time.perf_counter()
                self._read(session, [Piece(address + offset, wanted.into, offset, nbytes) for offset, nbytes in spans])
            read_s = (time.perf_counter() - started) / len(chunks)
            for chunk, (offset, nbytes) in zip(chunks, spans, strict=True):
                if not self._verified(wanted.into, offset, nbytes, chunk):
                    raise DamagedChunk(f"bytes {offset} to {offset + nbytes} are not those that were published")
                self._got(ORIGIN, chunk, nbytes, read_s)
        finally:
            self._wrote()

    def _from_peer(self, cell: int, chunk: int, where: tuple[str, int], claim: object, staging: Tensor) -> bool:
        """False if the read failed. Bytes that are not right count as a failure of the peer, not of the read."""
        wanted = self._wanted
        offset, nbytes = wanted.chunks.span(chunk)
        session, address = where
        try:
            self._read(session, [Piece(address + offset, staging, 0, nbytes)])
        except TransferError as error:
            self._lost(cell, chunk, str(error))
            return False
        if not self._verified(staging, 0, nbytes, chunk):
            self._lost(cell, chunk, "its bytes are not those of the snapshot; it may have gone on to the next one")
            return True
        with self._state:
            if self._reading.get(chunk) != (cell, claim):
                return True  # it took too long: another reader has the chunk
            self._writing += 1
        try:
            wanted.into[offset : offset + nbytes].copy_(staging[:nbytes])
            self._got(cell, chunk, nbytes, 0.0)
        finally:
            self._wrote()
        return True

    def _wrote(self) -> None:
        with self._state:
            self._writing -= 1
            self._state.notify_all()

    def _verified(self, buffer: Tensor, offset: int, nbytes: int, chunk: int) -> bool:
        started = time.perf_counter()
        right = digest_of(buffer, offset, nbytes) == digest_at(self._wanted.digests, chunk)
        with self._state:
            self._report.verify_s += time.perf_counter() - started
        return right

    def _got(self, source: int, chunk: int, nbytes: int, seconds: float) -> None:
        with self._state:
            self._reading.pop(chunk, None)
            self._swarm.got(source, chunk, seconds)
            self._delivered.add(source)
            if source == ORIGIN:
                self._report.origin_bytes += nbytes
            else:
                self._report.peer_bytes += nbytes
        if self._offers is not None:
            self._offers.add(self._wanted.digest, chunk)

    def _lost(self, cell: int, chunk: int, why: str) -> None:
        log.warning("chunk %d did not come from cell %d (%s): another source follows", chunk, cell, why)
        with self._state:
            self._swarm.failure(cell)
            self._read_elsewhere(cell)

    def _read_elsewhere(self, cell: int) -> None:
        """What is being read from a cell that is not to be relied on any more is read by others as well."""
        self._swarm.peer_gone(cell)
        for chunk in [c for c, (source, _) in self._reading.items() if source == cell]:
            del self._reading[chunk]
            self._swarm.again(chunk)
        self._state.notify_all()
