"""Where KV pages lie in memory. Invariant: slot s has `strides[b]` bytes at `bases[b] + s * strides[b]` in buffer b, so
a run of neighbouring pages is one contiguous piece per buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from services.cell_agent.engine.kv.errors import KvMismatch, KvUnsupported

Runs = Sequence[tuple[int, int]]  # (first slot, pages), in token order


@dataclass(frozen=True)
class Pool:
    """The KV buffers of one rank, each [slots, ...]."""

    buffers: tuple[torch.Tensor, ...]
    page: int
    layout: str

    @property
    def bases(self) -> tuple[int, ...]:
        return tuple(b.data_ptr() for b in self.buffers)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(b.stride(0) * b.element_size() for b in self.buffers)

    def slices(self, first: int, pages: int) -> list[torch.Tensor]:
        """The bytes of a run, one tensor per buffer; views, nothing is copied."""
        return [b[first : first + pages * self.page].view(torch.uint8).view(-1) for b in self.buffers]


def pool_of(cache: Any, page: int, rank: int, world: int) -> Pool:
    """The pool behind SGLang's KV cache object. Raises KvUnsupported for kinds whose state is not just pages of slots
    (sliding windows, Mamba, block-scaled KV, sparse indexers)."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    if type(cache) is MHATokenToKVPool:
        if cache.k_scale_buffer is not None or cache.native_k_scale_buffer is not None:
            raise KvUnsupported("block-scaled KV caches cannot be handed over; use another --kv-cache-dtype")
        buffers = (*cache.k_buffer, *cache.v_buffer)
    elif type(cache) is MLATokenToKVPool:
        buffers = tuple(cache.kv_buffer)
    else:
        raise KvUnsupported(f"KV caches of kind {type(cache).__name__} cannot be handed over")
    return pool(buffers, page, rank, world)


def pool(buffers: Sequence[torch.Tensor], page: int, rank: int, world: int) -> Pool:
    if not buffers or not all(b.is_contiguous() for b in buffers):
        raise KvUnsupported("KV buffers with gaps cannot be handed over")
    shapes = [f"{b.dtype}{list(b.shape[1:])}".removeprefix("torch.") for b in buffers]
    kinds = ",".join(f"{shapes.count(s)}x{s}" for s in dict.fromkeys(shapes))
    return Pool(tuple(buffers), page, f"page {page}, rank {rank} of {world}, {kinds}")


def starts(slots: torch.Tensor, page: int) -> list[int]:
    """First slots of the pages that `slots` (whole pages, in token order) fill."""
    pages = slots.detach().to("cpu", torch.int64).view(-1, page)
    if not torch.equal(pages, pages[:, :1] + torch.arange(page)):
        raise KvMismatch("the cache handed out slots that are not whole pages")
    return [int(s) for s in pages[:, 0]]


class Match(NamedTuple):
    """`pages` pages at the source's slot `remote` go to slot `local`, which lies in the receiver's run number `run`."""

    remote: int
    local: int
    run: int
    pages: int


def matched(remote: Runs, local: Runs, skip: int, page: int) -> list[Match]:
    """Pair the source's runs, without their first `skip` pages, with the receiver's: in token order, cut at the borders
    of both. Raises KvMismatch if they do not hold the same number of pages."""
    result: list[Match] = []
    ahead = [(first, pages) for first, pages in reversed(local)]
    run, used = 0, 0
    for first, pages in remote:
        dropped = min(skip, pages)
        skip, first, pages = skip - dropped, first + dropped * page, pages - dropped
        while pages:
            if not ahead:
                raise KvMismatch("the lease holds more pages than were allocated for it")
            start, room = ahead[-1]
            count = min(pages, room - used)
            result.append(Match(first, start + used * page, run, count))
            first, pages, used = first + count * page, pages - count, used + count
            if used == room:
                ahead.pop()
                run, used = run + 1, 0
    if ahead:
        raise KvMismatch("the lease holds fewer pages than were allocated for it")
    return result
