"""Moving weights between the control rank and the other ranks of a cell, over the cell's CPU group.

Invariant: exactly one context-parallel copy of each (tensor, pipeline) shard is sent; sizes follow from the spec
alone, so sender and receiver need no negotiation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from services.cell_agent.trainer.hf_map import Place, hf_shapes, places, to_local
from services.cell_agent.trainer.model_spec import ModelSpec
from services.cell_agent.trainer.parallel import Parallel

WEIGHTS_TAG = 8


def local_shapes(spec: ModelSpec, place: Place) -> dict[str, torch.Size]:
    """Names and shapes of a place's Megatron state dict."""
    full = {name: torch.empty(shape, device="meta") for name, shape in hf_shapes(spec).items()}
    return {name: tensor.shape for name, tensor in to_local(spec, place, full).items()}


def gather_weights(
    spec: ModelSpec, parallel: Parallel, local: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[Place, dict[str, Tensor]]:
    """On the control rank: the state dicts of all places, on the CPU. Elsewhere: {}."""
    mine = {name: tensor.cpu() for name, tensor in local.items()}
    if not parallel.is_control:
        if parallel.context_rank == 0:
            names = local_shapes(spec, parallel.place(spec.layers))
            dist.send(torch.cat([mine[name].reshape(-1) for name in names]), 0, parallel.control, WEIGHTS_TAG)
        return {}
    found: dict[Place, dict[str, Tensor]] = {}
    for index, place in enumerate(places(spec.layers, parallel.tensor, parallel.pipeline)):
        stage, tensor_rank = divmod(index, parallel.tensor)
        source = stage * parallel.tensor * parallel.context + tensor_rank  # Megatron's order: tensor, context, pipeline
        if source == 0:
            found[place] = mine
            continue
        shapes = local_shapes(spec, place)
        flat = torch.empty(sum(shape.numel() for shape in shapes.values()), dtype=dtype)
        dist.recv(flat, source, parallel.control, WEIGHTS_TAG)
        parts = flat.split([shape.numel() for shape in shapes.values()])
        found[place] = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
    return found


def scatter_bytes(parallel: Parallel, buffer: Tensor | None, nbytes: int) -> Tensor:
    """The control rank's `buffer` on every rank."""
    if parallel.world == 1:
        assert buffer is not None
        return buffer
    if buffer is None:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
    dist.broadcast(buffer, 0, parallel.control)
    return buffer
