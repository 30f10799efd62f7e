"""Frozen snapshots of the policy's weights: made on the core, read by every other cell over the Transfer Engine.

A snapshot is one contiguous host buffer with the Hugging Face tensors at 64-byte boundaries, a manifest (TensorSlice)
and the blake2b-256 digest of the whole buffer. Invariants: a published version's buffer does not change until the
version after the next is published; a pulled snapshot is handed out only after its digest was verified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.cell_agent.transfer.mooncake import Reader, TransferError, TransferSession
from shared.events import TensorSlice

ALIGNMENT = 64
KEPT_VERSIONS = 2


class SnapshotError(Exception):
    """Base of what can be wrong with a snapshot."""


class DigestMismatch(SnapshotError):
    """The bytes that were read are not the bytes that were published."""


class SnapshotMissing(SnapshotError):
    """This cell holds no snapshot of the wanted version."""


@dataclass(frozen=True)
class Snapshot:
    version: int
    buffer: Tensor = field(repr=False)  # uint8, contiguous
    tensors: tuple[TensorSlice, ...] = field(repr=False)
    digest: str

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


def digest(buffer: Tensor) -> str:
    return hashlib.blake2b(memoryview(buffer.numpy()), digest_size=32).hexdigest()


class Snapshots:
    """The snapshots one process holds: the last two it published or pulled, in buffers that are registered once and
    used in turn."""

    def __init__(self, session: TransferSession) -> None:
        self._session = session
        self._held: list[Snapshot] = []  # oldest first
        self._spare: list[Tensor] = []  # registered, content of no value
        self._quarantine: list[Tensor] = []  # a read that failed may still be written into; never used again

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
        return self._keep(Snapshot(version, buffer, slots, digest(buffer)))

    def pull(
        self,
        version: int,
        peer: str,
        address: int,
        nbytes: int,
        tensors: tuple[TensorSlice, ...],
        expected: str,
        read: Reader | None = None,
    ) -> Snapshot:
        """Read a published snapshot and verify it. Raises TransferError, DigestMismatch or SnapshotError."""
        buffer = self._buffer(nbytes)
        try:
            for slot in tensors:
                view(buffer, slot)
        except SnapshotError:
            self._spare.append(buffer)
            raise
        try:
            (read or self._session.read)(peer, address, buffer, nbytes)
        except TransferError:
            self._quarantine.append(buffer)
            raise
        found = digest(buffer)
        if found != expected:
            self._spare.append(buffer)
            raise DigestMismatch(
                f"version {version} from {peer}: digest {found[:16]} instead of {expected[:16]}; the owner has "
                "published newer versions meanwhile, or the bytes were damaged; pull the newest WeightsPublished"
            )
        return self._keep(Snapshot(version, buffer, tensors, found))

    def _buffer(self, nbytes: int) -> Tensor:
        """A registered buffer to fill; the oldest held version stops being available."""
        while len(self._held) >= KEPT_VERSIONS:
            self._spare.append(self._held.pop(0).buffer)
        while self._spare:
            buffer = self._spare.pop()
            if buffer.nbytes == nbytes:
                return buffer
            self._session.unregister(buffer)
        buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self._session.register(buffer)
        return buffer

    def _keep(self, snapshot: Snapshot) -> Snapshot:
        self._spare += [s.buffer for s in self._held if s.version == snapshot.version]
        self._held = [s for s in self._held if s.version != snapshot.version]
        self._held.append(snapshot)
        return snapshot
