"""The torch.distributed world of one cell and this process's place in it.

Invariant: a world is one cell; data parallelism inside it is 1. Everything that crosses cells goes through groups.py or
the Transfer Engine. `control` is a CPU group over all ranks, on GPUs too: commands and host buffers travel on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from services.cell_agent.trainer import cpu_shim
from services.cell_agent.trainer.hf_map import Place

IDLE = timedelta(days=30)  # waiting for the agent's next command is not a fault; a dead rank closes its connections


@dataclass(frozen=True)
class Parallel:
    rank: int
    world: int
    tensor: int
    pipeline: int
    context: int
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def is_control(self) -> bool:
        return self.rank == 0

    @property
    def first(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    def place(self, layers: int) -> Place:
        """Which part of a model of `layers` layers this rank holds."""
        return Place.of(layers, self.tensor, self.tensor_rank, self.pipeline, self.pipeline_rank)


def start(
    rank: int, world: int, tensor: int, pipeline: int, context: int, device: str, port: int, host: str = "127.0.0.1"
) -> Parallel:
    """Join the cell's world and set up Megatron's parallel state."""
    if world != tensor * pipeline * context:
        raise ValueError(f"world of {world} ranks for tensor {tensor} x pipeline {pipeline} x context {context}")
    cpu_shim.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    store = dist.HashStore() if world == 1 else dist.TCPStore(host, port, world, rank == 0, timedelta(minutes=5))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
        create_gloo_process_groups=False,
    )
    if not cuda:
        initialize_rng_tracker(inference_rng_tracker=True)  # nothing here draws random numbers: no dropout, no init
    control = dist.new_group(backend="gloo", timeout=IDLE)
    return Parallel(
        rank=rank,
        world=world,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        control=control,
    )
