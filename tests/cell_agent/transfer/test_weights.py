"""Snapshots: published bytes are frozen, pulled bytes are verified."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cell_agent.transfer.chunks import Chunks, digests_of, name_of
from services.cell_agent.transfer.mooncake import PeerUnreachable, Piece, Reader, TransferSession
from services.cell_agent.transfer.weights import (
    ALIGNMENT,
    DigestMismatch,
    Snapshot,
    SnapshotError,
    SnapshotMissing,
    Snapshots,
    manifest,
    view,
)
from shared.events import WeightsPublished

SHAPES: dict[str, tuple[int, ...]] = {"a.weight": (3, 5), "b.bias": (7,), "c.weight": (2, 2, 2)}


@pytest.fixture
def session() -> TransferSession:
    return TransferSession("127.0.0.1")


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def publish(snapshots: Snapshots, version: int) -> Snapshot:
    return snapshots.publish(version, SHAPES, torch.float32, values(version).items())


def told(source: Snapshot, address: str, **changed: object) -> WeightsPublished:
    """What its owner says of a snapshot."""
    fields: dict[str, object] = {
        "version": source.version,
        "cell": 0,
        "incarnation": "i",
        "session": address,
        "address": source.buffer.data_ptr(),
        "nbytes": source.buffer.nbytes,
        "tensors": source.tensors,
        "digest": source.digest,
        "chunk_bytes": source.chunk_bytes,
        "chunks": source.chunks,
    }
    return WeightsPublished(**(fields | changed))  # type: ignore[arg-type]


def pull(
    snapshots: Snapshots, source: Snapshot, address: str, read: Reader | None = None, **changed: object
) -> Snapshot:
    return snapshots.pull(told(source, address, **changed), read=read)[0]


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=8), st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1
    ),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_manifest_places_tensors_apart_and_aligned(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    slots, nbytes = manifest(shapes, dtype)
    end = 0
    for slot in slots:
        assert slot.offset >= end
        assert slot.offset % ALIGNMENT == 0
        end = slot.offset + slot.nbytes
        assert view(torch.zeros(nbytes, dtype=torch.uint8), slot).shape == shapes[slot.name]
    assert end <= nbytes


def test_pulled_weights_are_the_published_ones(session: TransferSession) -> None:
    source = publish(Snapshots(session), 3)
    other = TransferSession("127.0.0.1")
    pulled = pull(Snapshots(other), source, session.address)
    assert pulled.digest == source.digest
    assert all(torch.equal(tensor, values(3)[name]) for name, tensor in pulled.views().items())
    assert source.buffer.data_ptr() != pulled.buffer.data_ptr()


def test_a_wrong_digest_is_refused_and_nothing_is_handed_out(session: TransferSession) -> None:
    source = publish(Snapshots(session), 3)
    mine = Snapshots(TransferSession("127.0.0.1"))
    with pytest.raises(DigestMismatch, match="version 3"):
        pull(mine, source, session.address, digest="0" * 64)
    source.buffer[5] ^= 1  # damaged after it was published
    with pytest.raises(DigestMismatch):
        pull(mine, source, session.address)
    with pytest.raises(SnapshotMissing):
        mine.get(3)
    source.buffer[5] ^= 1
    assert pull(mine, source, session.address) is mine.get(3)


def test_the_last_two_versions_stay_frozen_and_buffers_are_used_in_turn(session: TransferSession) -> None:
    snapshots = Snapshots(session)
    held = [publish(snapshots, version) for version in range(5)]
    assert {s.buffer.data_ptr() for s in held} == {held[0].buffer.data_ptr(), held[1].buffer.data_ptr()}
    for version in (3, 4):
        kept = snapshots.get(version)
        chunks = Chunks(kept.buffer.nbytes, kept.chunk_bytes)
        assert name_of(version, chunks, digests_of(kept.buffer, chunks)) == held[version].digest
        assert torch.equal(snapshots.get(version).views()["b.bias"], values(version)["b.bias"])
    with pytest.raises(SnapshotMissing, match=r"held: \[3, 4\]"):
        snapshots.get(2)


def test_a_version_published_again_replaces_the_first(session: TransferSession) -> None:
    snapshots = Snapshots(session)
    for version in (1, 2, 2, 3):
        publish(snapshots, version)
    assert torch.equal(snapshots.get(3).views()["b.bias"], values(3)["b.bias"])
    assert torch.equal(snapshots.get(2).views()["b.bias"], values(2)["b.bias"])


def test_a_reader_that_comes_too_late_sees_it(session: TransferSession) -> None:
    snapshots = Snapshots(session)
    first = publish(snapshots, 1)
    publish(snapshots, 2)
    publish(snapshots, 3)  # reuses the first buffer
    with pytest.raises(DigestMismatch, match="newer versions"):
        pull(Snapshots(TransferSession("127.0.0.1")), first, session.address)


def test_a_failed_read_never_lends_its_buffer_again(session: TransferSession) -> None:
    """The transport may still write into it."""
    source = publish(Snapshots(session), 1)
    mine = Snapshots(TransferSession("127.0.0.1"))
    seen: list[int] = []

    def scripted_failure(peer: str, pieces: Sequence[Piece]) -> int:
        seen.append(pieces[0].into.data_ptr())
        raise PeerUnreachable(peer)

    for _ in range(3):
        with pytest.raises(PeerUnreachable):
            pull(mine, source, session.address, read=scripted_failure)
    assert len(set(seen)) == 3
    assert pull(mine, source, session.address).buffer.data_ptr() not in seen


def test_a_manifest_that_does_not_fit_is_refused(session: TransferSession) -> None:
    source = publish(Snapshots(session), 1)
    slots, _ = manifest({"far": (10_000,)}, torch.float32)
    with pytest.raises(SnapshotError, match="far"):
        pull(Snapshots(TransferSession("127.0.0.1")), source, session.address, tensors=slots)
    with pytest.raises(SnapshotError, match=r"b\.bias"):
        Snapshots(session).publish(1, SHAPES, torch.float32, [(n, t) for n, t in values(1).items() if n != "b.bias"])
