"""Lets Megatron-core run where there is no CUDA device.

Owns every change to torch's and Megatron's globals that this takes, and makes none of them when CUDA is there.
Invariant: the training code above is the same on CPU and GPU. Only training workers may call `install`: it changes
the process.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

_FACTORIES = frozenset({"zeros", "ones", "empty", "full", "tensor"})
_LITERAL_CUDA = (  # modules of Megatron that write device="cuda" literally
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.utils",
)


class _TorchOnCpu:
    """Stands for the name `torch` inside one module; tensor factories ignore a literal CUDA device."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in _FACTORIES:
            return value

        def make(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return value(*args, **kwargs)

        return make


class _Stream:
    """What code that orders CUDA streams may call where everything is in order already."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


def install() -> None:
    """Send Megatron's CUDA calls to the CPU. No effect where CUDA is available; idempotent."""
    if torch.cuda.is_available():
        return
    _import_megatron()
    stream = _Stream()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.default_stream = lambda device=None: stream
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    for name in _LITERAL_CUDA:
        vars(importlib.import_module(name))["torch"] = _TorchOnCpu()


def _import_megatron() -> None:
    """Import Megatron without what only a GPU uses: its fused functions are decorated with torch.compile, which would
    load the compiler, and it imports Triton where installed. Saves 140 MB and 2.5 s per process."""
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
    compiler = torch.compile
    torch.compile = lambda model=None, **kwargs: model if model is not None else (lambda f: f)
    try:
        for name in ("megatron.core.models.gpt", "megatron.core.optimizer", *_LITERAL_CUDA):
            importlib.import_module(name)
    finally:
        torch.compile = compiler


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Megatron's optimizers compare `tensor.type()` with 'torch.cuda.FloatTensor' and the like; inside this context a
    CPU tensor answers in that form. No effect where CUDA is available."""
    if torch.cuda.is_available():
        yield
        return
    original = torch.Tensor.type

    def named(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, *args, **kwargs)

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = original
