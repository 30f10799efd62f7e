"""The core's optimizer: Megatron's Adam over the summed gradients of a batch.

Invariant: the divisor (executions of the batch) is applied exactly once, here, right before clipping and the update;
the learning rate depends only on the version being made, so a resumed run continues the warm-up where it was.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from services.cell_agent.trainer.cpu_shim import cuda_type_names
from shared.config import TrainingConfig

log = logging.getLogger(__name__)


def build_optimizer(model: Any, training: TrainingConfig, dtype: torch.dtype) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=training.learning_rate,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        weight_decay=training.weight_decay,  # Megatron exempts biases and norms
        clip_grad=training.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=False,  # one data-parallel rank: there is nobody to share the state with
    )
    with cuda_type_names():
        return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


def learning_rate(training: TrainingConfig, version: int) -> float:
    """Linear warm-up over the first `warmup_steps` versions, then constant. `version` counts from 1."""
    if training.warmup_steps <= 0:
        return training.learning_rate
    return training.learning_rate * min(1.0, version / training.warmup_steps)


def step(model: Any, optimizer: Any, training: TrainingConfig, executions: int, version: int) -> dict[str, float]:
    """Divide, clip, update. A gradient that is not finite changes nothing and is reported as skipped=1."""
    if executions < 1:
        raise ValueError(f"a batch of {executions} executions cannot be stepped")
    finite = True
    for buffer in gradient_buffers(model):
        buffer.mul_(1.0 / executions)
        finite = finite and math.isfinite(float(buffer.sum()))
    rate = learning_rate(training, version)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
    result = {"learning_rate": rate, "skipped": 0.0, "grad_norm": 0.0}
    if not _finite_everywhere(finite):
        log.error("version %d: the summed gradient is not finite; the weights stay as they are", version)
        return result | {"skipped": 1.0, "grad_norm": math.inf}
    with cuda_type_names():
        updated, norm, _ = optimizer.step()
    optimizer.zero_grad()  # it made parameter.grad the gradient buffer itself; the next backward would add to it twice
    return result | {"grad_norm": float(norm or 0.0), "skipped": 0.0 if updated else 1.0}


def gradient_buffers(model: Any) -> list[torch.Tensor]:
    """The contiguous fp32 buffers that hold all gradients of this rank."""
    return [buffer.grad_data for buffer in model.buffers]


def _finite_everywhere(finite: bool) -> bool:
    """All ranks of the cell must decide alike."""
    if torch.distributed.get_world_size() == 1:
        return finite
    flag = torch.tensor(int(finite), device=torch.cuda.current_device())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
    return bool(flag)
