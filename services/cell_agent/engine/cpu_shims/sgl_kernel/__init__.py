"""The compiled `sgl_kernel` package as far as a dense model on the torch_native attention backend calls it on a CPU.

No registry ships SGLang's CPU kernels. This stand-in is put on the path by engine/launch.py, only where there is no
accelerator. Invariant: what is here computes what the compiled kernel computes; everything else raises on first call
and says which kernel is missing, so that nothing runs on wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.0.0+gyre.cpu"


class MissingKernel(NotImplementedError):
    """SGLang asked for a kernel that this CPU stand-in does not have."""


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """Write each request's new KV slots into its row: table[requests[i], starts[i]:ends[i]] = the next slots."""
    taken = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[row, start:end] = slots[taken : taken + count].to(table.dtype)
        taken += count


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise MissingKernel(f"sgl_kernel.{name} does not exist on a CPU: choose SGLang options that do not need it")

    missing.__name__ = name
    return missing
