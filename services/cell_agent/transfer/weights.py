"""Frozen snapshots of the policy's weights: made on the core, read by every other cell over the Transfer Engine.

A snapshot is one contiguous host buffer with the Hugging Face tensors at 64-byte boundaries, a manifest (TensorSlice),
the digests of its chunks, and one digest over these that names it (chunks.py). Cells that pull pass on what they have
(fanout.py). Invariants: a published version's buffer does not change until the version after the next is published; a
pulled snapshot is handed out only after every chunk was verified; what this process offers others is what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from services.cell_agent.transfer.chunks import DIGEST_BYTES, Chunks, chunk_size, digests_of, name_of
from services.cell_agent.transfer.fanout import DamagedChunk, Pull, Report, Wanted
from services.cell_agent.transfer.mooncake import Reader, TransferError, TransferSession
from services.cell_agent.transfer.offers import Offers
from shared.events import TensorSlice

ALIGNMENT = 64
KEPT_VERSIONS = 2


class SnapshotError(Exception):
    """Base of what can be wrong with a snapshot."""


class DigestMismatch(SnapshotError):
    """The bytes that were read are not the bytes that were published."""


class SnapshotMissing(SnapshotError):
    """This cell holds no snapshot of the wanted version."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    version: int
    buffer: Tensor = field(repr=False)  # uint8, contiguous
    tensors: tuple[TensorSlice, ...] = field(repr=False)
    digest: str
    chunk_bytes: int
    chunks: bytes = field(repr=False)  # digests, one after the other

    def views(self) -> dict[str, Tensor]:
        """Tensors by name, without copying."""
        return {slot.name: view(self.buffer, slot) for slot in self.tensors}


def manifest(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[tuple[TensorSlice, ...], int]:
    """Where each tensor lies in the buffer, and the buffer's size in bytes."""
    slots: list[TensorSlice] = []
    at = 0
    for name, shape in shapes.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        slots.append(TensorSlice(name, str(dtype).removeprefix("torch."), tuple(shape), at, nbytes))
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(slots), at


def view(buffer: Tensor, slot: TensorSlice) -> Tensor:
    dtype = getattr(torch, slot.dtype, None)
    if not isinstance(dtype, torch.dtype) or slot.offset + slot.nbytes > buffer.nbytes:
        raise SnapshotError(f"manifest entry {slot.name} does not fit its buffer of {buffer.nbytes} bytes")
    return buffer[slot.offset : slot.offset + slot.nbytes].view(dtype).view(slot.shape)


class Published(Protocol):
    """What is told of a snapshot: events.WeightsPublished and the trainer protocol's Published and Pull."""

    @property
    def version(self) -> int: ...
    @property
    def session(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def tensors(self) -> tuple[TensorSlice, ...]: ...
    @property
    def digest(self) -> str: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def chunks(self) -> bytes: ...


class Snapshots:
    """The snapshots one process holds: the last two it published or pulled, in buffers that are registered once and
    used in turn. `cell`: whose process this is; `offers`: where others hear of them (None: nowhere)."""

    def __init__(self, session: TransferSession, cell: int = 0, offers: Offers | None = None) -> None:
        self._session, self._cell, self._offers = session, cell, offers
        self._held: list[Snapshot] = []  # oldest first
        self._spare: list[Tensor] = []  # registered, content of no value
        self._quarantine: list[Tensor] = []  # a read that failed may still be written into; never used again

    @classmethod
    def of_cell(cls, cell: int, host: str, transfer: str) -> Snapshots:
        """Those of a cell's control process, with a Transfer Engine and offers at `host`."""
        session = TransferSession(host, transfer)
        return cls(session, cell, Offers(host, cell, session.address))

    @property
    def session_address(self) -> str:
        return self._session.address

    @property
    def offers_address(self) -> str:
        return self._offers.address if self._offers is not None else ""

    def get(self, version: int) -> Snapshot:
        for snapshot in self._held:
            if snapshot.version == version:
                return snapshot
        held = [s.version for s in self._held]
        raise SnapshotMissing(f"no snapshot of version {version} is held here (held: {held}); pull it first")

    def publish(
        self,
        version: int,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        tensors: Iterable[tuple[str, Tensor]],
    ) -> Snapshot:
        """Freeze `tensors` (name, value; exactly those of `shapes`) as `version`."""
        slots, nbytes = manifest(shapes, dtype)
        buffer = self._buffer(nbytes)  # gaps between tensors stay zero: every snapshot of a model has the same manifest
        by_name = {slot.name: slot for slot in slots}
        for name, tensor in tensors:
            view(buffer, by_name.pop(name)).copy_(tensor)
        if by_name:
            raise SnapshotError(f"version {version} lacks the tensors {sorted(by_name)}")
        chunks = Chunks(nbytes, chunk_size(nbytes))
        digests = digests_of(buffer, chunks)
        return self._keep(Snapshot(version, buffer, slots, name_of(version, chunks, digests), chunks.size, digests))

    def pull(self, source: Published, peers: Sequence[str] = (), read: Reader | None = None) -> tuple[Snapshot, Report]:
        """Read a published snapshot, unless it is held already, from its owner and from cells that have some of it
        (`peers`: where their Offers are); verified. Raises TransferError, DigestMismatch or SnapshotError."""
        chunks = Chunks(source.nbytes, source.chunk_bytes)
        if source.chunk_bytes <= 0 or len(source.chunks) != chunks.count * DIGEST_BYTES:
            raise SnapshotError(f"version {source.version} comes with digests for another number of chunks")
        if name_of(source.version, chunks, source.chunks) != source.digest:
            raise DigestMismatch(
                f"version {source.version}: digest {source.digest[:16]} does not name this version with these chunks"
            )
        held = self._find(source.digest)
        if held is not None:
            return held, Report()
        buffer = self._buffer(source.nbytes)
        try:
            for slot in source.tensors:
                view(buffer, slot)
        except SnapshotError:
            self._spare.append(buffer)
            raise
        origin = (source.session, source.address)
        wanted = Wanted(origin, peers, source.digest, source.chunks, chunks, buffer)
        self._offer(source.digest, buffer, chunks, whole=False)
        try:
            report = Pull(self._session, self._offers, self._cell, wanted, self._quarantine, read).run()
        except TransferError:
            self._withdraw(source.digest)
            self._quarantine.append(buffer)
            raise
        except DamagedChunk as error:
            self._withdraw(source.digest)
            self._spare.append(buffer)
            raise DigestMismatch(
                f"version {source.version} from {source.session}: {error}; the owner has published newer versions "
                "meanwhile, or the bytes were damaged; pull the newest WeightsPublished"
            ) from error
        snapshot = Snapshot(source.version, buffer, source.tensors, source.digest, source.chunk_bytes, source.chunks)
        return self._keep(snapshot), report

    def _offer(self, digest: str, buffer: Tensor, chunks: Chunks, *, whole: bool) -> None:
        if self._offers is not None:
            has = np.full(chunks.count, whole, dtype=np.bool_)
            self._offers.hold(digest, buffer.data_ptr(), has, pulling=not whole)

    def _withdraw(self, digest: str) -> None:
        if self._offers is not None:
            self._offers.withdraw(digest)

    def _find(self, digest: str) -> Snapshot | None:
        return next((s for s in self._held if s.digest == digest), None)

    def _buffer(self, nbytes: int) -> Tensor:
        """A registered buffer to fill; the oldest held version stops being available."""
        while len(self._held) >= KEPT_VERSIONS:
            self._drop(self._held[0])
        while self._spare:
            buffer = self._spare.pop()
            if buffer.nbytes == nbytes:
                return buffer
            self._session.unregister(buffer)
        buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self._session.register(buffer)
        return buffer

    def _drop(self, snapshot: Snapshot) -> None:
        self._held.remove(snapshot)
        self._withdraw(snapshot.digest)
        self._spare.append(snapshot.buffer)

    def _keep(self, snapshot: Snapshot) -> Snapshot:
        for same in [s for s in self._held if s.version == snapshot.version]:
            self._drop(same)
        self._held.append(snapshot)
        self._offer(snapshot.digest, snapshot.buffer, Chunks(snapshot.buffer.nbytes, snapshot.chunk_bytes), whole=True)
        return snapshot
