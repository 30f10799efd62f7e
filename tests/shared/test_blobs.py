"""The blob store on a real disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from shared.blobs import BlobCorrupt, BlobMissing, BlobStore, write_atomically
from shared.events import BlobRef


def test_what_is_put_comes_back_under_its_digest(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    for data in (b"", b"x", bytes(range(256)) * 5000):
        ref = store.put(data)
        assert ref == BlobRef(hashlib.blake2b(data, digest_size=32).hexdigest(), len(data))
        assert store.get(ref) == data
        assert store.put(data) == ref
    assert len([p for p in (tmp_path / "blobs").rglob("*") if p.is_file()]) == 3  # no drafts left


def test_a_missing_a_changed_and_a_cut_blob_are_told_apart(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.put(b"hello")
    with pytest.raises(BlobMissing):
        store.get(BlobRef("0" * 64, 5))
    store.path(ref).write_bytes(b"hellO")
    with pytest.raises(BlobCorrupt):
        store.get(ref)
    store.path(ref).write_bytes(b"hell")
    with pytest.raises(BlobCorrupt):
        store.get(ref)
    assert store.put(b"hello") == ref  # the cut one is replaced
    assert store.get(ref) == b"hello"


def test_a_digest_cannot_lead_out_of_the_store(tmp_path: Path) -> None:
    with pytest.raises(BlobMissing):
        BlobStore(tmp_path / "blobs").get(BlobRef("../../etc/passwd", 1))


def test_writing_atomically_replaces_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"old")
    write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"new and longer"
    assert list(tmp_path.iterdir()) == [path]
