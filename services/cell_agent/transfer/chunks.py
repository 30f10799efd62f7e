"""A snapshot's chunks: the unit that is read, verified and passed on. Pure.

Each chunk has an XXH3-128 digest; the blake2b-256 over all of them names the snapshot. A chunk can so be verified, and
offered to others, as soon as it is there. XXH3, because a cryptographic hash runs at 1 GB/s a core, well below the
links; it finds damaged and replaced bytes, not forged ones (neither links nor registered memory have authentication).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import xxhash
from torch import Tensor

DIGEST_BYTES = 16
LEAST, MOST = 256 << 10, 64 << 20
WANTED = 256  # chunks a snapshot: with fewer, cells that pull together wait for whole chunks of each other


@dataclass(frozen=True)
class Chunks:
    """`size` bytes each, the last one may be shorter, of `nbytes` in all."""

    nbytes: int
    size: int

    @property
    def count(self) -> int:
        return -(-self.nbytes // self.size)

    def span(self, index: int) -> tuple[int, int]:
        """(offset, bytes) of a chunk."""
        offset = index * self.size
        return offset, min(self.size, self.nbytes - offset)


def chunk_size(nbytes: int) -> int:
    size = LEAST
    while size < MOST and size * WANTED < nbytes:
        size *= 2
    return size


def digest_of(buffer: Tensor, offset: int, nbytes: int) -> bytes:
    """Of a part of a contiguous uint8 buffer."""
    return xxhash.xxh3_128(memoryview(buffer.numpy())[offset : offset + nbytes]).digest()


def digests_of(buffer: Tensor, chunks: Chunks) -> bytes:
    """Of all chunks, one after the other."""
    return b"".join(digest_of(buffer, *chunks.span(i)) for i in range(chunks.count))


def digest_at(digests: bytes, index: int) -> bytes:
    return digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def name_of(version: int, chunks: Chunks, digests: bytes) -> str:
    """The digest of a whole snapshot. It has the version in it: equal bytes of two versions are two snapshots."""
    head = f"{version} {chunks.nbytes} {chunks.size} ".encode()
    return hashlib.blake2b(head + digests, digest_size=32).hexdigest()
