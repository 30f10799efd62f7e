"""The few operations of SGLang's prefix cache and slot allocator that a hand-over needs, on one rank.

Everything that changes the tree or the allocator must happen in the same order on all tensor-parallel ranks (SGLang
counts on equal slots everywhere), so these are called only while a command is handled, never from a thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.cell_agent.engine.kv.errors import KvNoRoom


@dataclass(frozen=True)
class Prefix:
    """A cached prefix: its last node, its length in tokens."""

    node: Any
    length: int


class PrefixCache:
    def __init__(self, tree: Any, allocator: Any, page: int, world: int, group: Any, forward_stream: Any) -> None:
        self.tree, self.allocator, self.page = tree, allocator, page
        self.world, self._group, self._forward_stream = world, group, forward_stream

    @property
    def version(self) -> str:
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version)

    def key(self, tokens: Sequence[int], extra_key: str | None, salt: str | None = None) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens), extra_key, cache_salt=salt).page_aligned(self.page)

    def find(self, tokens: Sequence[int], extra_key: str | None, salt: str | None = None) -> Prefix:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        found = self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens, extra_key, salt)))
        return Prefix(found.last_device_node, int(found.device_prefix_len))

    def slots(self, prefix: Prefix) -> torch.Tensor:
        path = self.tree.tree_core.collect_full_device_indices(prefix.node, self.tree.root_node_handle())
        return path[: prefix.length]

    def lock(self, node: Any) -> Any:
        return self.tree.lock(node)

    def unlock(self, lock: Any) -> None:
        self.tree.unlock(lock)

    def allocate(self, count: int) -> torch.Tensor:
        """`count` slots, whole pages. Evicts cached prefixes that nobody holds. Raises KvNoRoom."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        missing = count - int(self.allocator.available_size())
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))
        slots = self.allocator.alloc(count)
        if slots is None:
            raise KvNoRoom(f"no room for {count} tokens of KV; recompute when the call is admitted")
        return slots.to(torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        self.allocator.free(slots)

    def take_back(self, slots: torch.Tensor) -> None:
        """After the allocator was cleared: take exactly `slots`, which a transfer may still write."""
        every = self.allocator.alloc(int(self.allocator.available_size()))
        self.allocator.free(every[~torch.isin(every, slots)])

    def insert(self, tokens: Sequence[int], extra_key: str, held: Prefix, slots: torch.Tensor) -> Prefix:
        """Put `tokens` into the cache: the first `held.length` are there already, `slots` hold the others. The cache
        owns the slots from here on."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        value = torch.cat([self.slots(held).to(torch.int64), slots])
        params = InsertParams(key=self.key(tokens, extra_key), value=value, prev_prefix_len=held.length)
        return Prefix(self.tree.insert(params).last_device_node, len(tokens))

    def drop_unused(self) -> None:
        """Evict every cached prefix that no call and no lease holds."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if (size := int(self.tree.evictable_size())) > 0:
            self.tree.evict(EvictParams(num_tokens=size))

    def device_events(self) -> list[Any]:
        """Events after which all work on the pages that was launched so far is over, recorded as SGLang's own cache
        linker does before an offload: on the current stream and on the forward stream. Unchecked: never ran on a GPU.
        """
        if torch.device(self.tree.device).type == "cpu":
            return []
        device = torch.get_device_module(self.tree.device)
        events = [device.Event(), device.Event()]
        events[0].record()
        events[1].record(self._forward_stream)
        return events

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """True where it is true on every rank. A collective: call it on all ranks for the same command."""
        if self.world == 1 or not flags:
            return list(flags)
        votes = torch.tensor([int(f) for f in flags], dtype=torch.int)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=self._group)
        return [bool(v) for v in votes]
