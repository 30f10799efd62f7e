"""Gradient reduction across cells: groups of same-position ranks of different cells, made by name.

Each cell is a torch.distributed world of its own, so these groups stand outside of all of them: they meet at a TCP
store that the core's control rank serves. Invariant: a group name stands for one set of cell incarnations, so a
member that comes back under a new incarnation can never be mistaken for the one that died; a missing member fails the
call by name within the time limit.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(seconds=120)


class ReduceError(Exception):
    """Gradients could not be summed across cells; the batch has to be trained again."""


def serve_store(host: str) -> tuple[dist.TCPStore, str]:
    """The store all cells meet at, on any free port of this process, and its address host:port."""
    store = dist.TCPStore(host, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    return store, f"{host}:{store.port}"


class CellGroups:
    """This rank's groups with its counterparts in other cells. `position` = rank inside the cell."""

    def __init__(self, position: int, device: torch.device, timeout: timedelta = TIMEOUT) -> None:
        self._position, self._device, self._timeout = position, device, timeout
        self._stores: dict[str, dist.TCPStore] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}

    def reduce(self, name: str, rank: int, size: int, address: str, buffers: list[Tensor]) -> None:
        """Sum `buffers` of all members into the core's (rank 0). Raises ReduceError."""
        if size == 1:
            return
        key = f"{name}/{self._position}"
        try:
            if key not in self._groups:
                count = sum(buffer.numel() for buffer in buffers)
                self._groups[key] = self._build(key, rank, size, address, count)
            options = dist.ReduceOptions()
            options.rootRank = 0
            for buffer in buffers:
                self._groups[key].reduce([buffer], options).wait(self._timeout)
        except (RuntimeError, dist.DistError) as error:
            self._groups.pop(key, None)
            raise ReduceError(f"reduction over cells '{name}' (member {rank} of {size}) failed: {error}") from error

    def _build(self, key: str, rank: int, size: int, address: str, count: int) -> dist.ProcessGroup:
        if address not in self._stores:
            host, port = address.rsplit(":", 1)
            self._stores[address] = dist.TCPStore(
                host, int(port), is_master=False, timeout=self._timeout, wait_for_workers=False
            )
        store = dist.PrefixStore(key, self._stores[address])
        store.set(f"elements/{rank}", str(count))
        for other in range(size):
            theirs = int(store.get(f"elements/{other}"))
            if theirs != count:
                raise ReduceError(
                    f"member {other} of '{key}' has {theirs} gradient elements, member {rank} has {count}"
                )
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        return dist.ProcessGroupGloo(store, rank, size, self._timeout)
