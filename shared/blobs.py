"""Large objects outside the stream: files named by the blake2b-256 digest of their bytes.

Invariants: a blob never changes; a file under its final name is complete (written elsewhere, synced, then renamed);
`get` returns bytes that hash to the reference or raises. `put` of the same bytes is free the second time.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

from shared.events import BlobRef


class BlobMissing(LookupError):
    """The reference names a blob that is not in this store."""


class BlobCorrupt(ValueError):
    """The stored bytes do not match the reference."""


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """blake2b-256 of `data`, in hex."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


class BlobStore:
    """Blobs under `root`, spread over 256 folders by the first two digits of the digest."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, ref: BlobRef) -> Path:
        """Where the blob lies; BlobMissing if the digest cannot be one (it never leads out of the store)."""
        if len(ref.digest) != 64 or not set(ref.digest) <= set("0123456789abcdef"):
            raise BlobMissing(f"{ref.digest!r} is no blake2b-256 digest")
        return self.root / ref.digest[:2] / ref.digest

    def has(self, ref: BlobRef) -> bool:
        return self.path(ref).is_file()

    def put(self, data: bytes) -> BlobRef:
        """Store `data` durably; returns its reference."""
        ref = BlobRef(digest_of(data), len(data))
        path = self.path(ref)
        if path.is_file() and path.stat().st_size == len(data):
            return ref
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
        return ref

    def get(self, ref: BlobRef) -> bytes:
        """The blob's bytes, verified. Raises BlobMissing or BlobCorrupt."""
        path = self.path(ref)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise BlobMissing(f"blob {ref.digest} ({ref.size} bytes) is not in {self.root}") from error
        if len(data) != ref.size or digest_of(data) != ref.digest:
            raise BlobCorrupt(
                f"{path} does not match its name ({len(data)} bytes, expected {ref.size}): the file was changed or "
                "the disk is bad; remove it, whoever made it will have to make it again"
            )
        return data


def write_atomically(path: Path, data: bytes) -> None:
    """`path` holds `data` durably, or what it held before; never a part."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("xb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
