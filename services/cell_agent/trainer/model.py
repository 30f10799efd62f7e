"""Megatron-core's GPT model, built from a ModelSpec, over packed token trees.

Same code on CPU and GPU. Invariant: for every path of the tree, the logits are those Hugging Face's model computes for
that path alone. Hidden states become logits only at the rows asked for (the parents of trained tokens).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from services.cell_agent.trainer.model_spec import ModelSpec
from services.cell_agent.trainer.parallel import Parallel
from services.cell_agent.trainer.tree_attention import TreeMask, tree_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RmsNorm(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        result: Tensor = _RmsNorm.apply(x, self.weight, self.eps)
        return result


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """On the CPU torch composes RMS norm of many kernels and keeps each intermediate; this keeps the input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        grad = gradients[0] * normed
        grad_weight = grad.reshape(-1, x.shape[-1]).sum(0)
        mean = torch.matmul(grad, weight.to(grad.dtype)).div_(x.shape[-1])[..., None]
        grad_x = (gradients[0] * weight).sub_(normed.mul_(mean)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class TreeCoreAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's core attention slot. query [Q, 1, H, D], key and value [K, 1, G, D], attention_mask a TreeMask.

    With context parallelism each rank holds a slice of the queries and gathers all keys and values."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: TreeMask, **_: Any) -> Tensor:
        if self.groups.cp.size() > 1:
            both = tensor_parallel.gather_from_sequence_parallel_region(
                torch.cat([key, value], -1), tensor_parallel_output_grad=True, group=self.groups.cp
            )
            key, value = both.split([key.shape[-1], value.shape[-1]], -1)
        out = tree_attention(query[:, 0], key[:, 0], value[:, 0], attention_mask, self.scale)
        return out.reshape(out.shape[0], 1, -1)


class TreeGPT(GPTModel):  # type: ignore[misc]
    """GPTModel whose positions are explicit and whose output layer sees only the rows that carry loss."""

    def __init__(self, spec: ModelSpec, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        self.register_buffer("inverse_frequencies", 1.0 / (spec.rope_theta**exponents), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, mask: TreeMask, rows: Tensor) -> Tensor:
        """tokens, positions int64 [T] -> hidden states [T, 1, H], or on the last stage logits [rows, 1, V/tp]."""
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=tokens[None], position_ids=positions[None])
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies
        rotary = torch.cat([angles, angles], -1)[:, None, None, :]
        hidden = self.decoder(hidden_states=embedded, attention_mask=mask, rotary_pos_emb=rotary)
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: Tensor = self.output_layer(hidden.index_select(0, rows), weight=weight)[0]
        return logits


def transformer_config(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    cuda = parallel.device.type == "cuda"
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.ffn,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        qk_layernorm=spec.qk_norm,
        add_qkv_bias=spec.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not cuda,
        perform_initialization=False,  # weights always come from a folder, a checkpoint or a snapshot
        bias_dropout_fusion=False,
        bias_activation_fusion=True,  # one function for SwiGLU that keeps its input only
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        calculate_per_token_loss=True,  # the loss is a sum; nothing below may divide it
        deallocate_pipeline_outputs=False,
        finalize_model_grads_func=finalize_model_grads,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
    )


def build_model(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype) -> DistributedDataParallel:
    """The rank's part of the model behind Megatron's gradient buffers (contiguous, fp32), without weights yet."""
    spec.check_layout(parallel.tensor, parallel.pipeline)
    config = transformer_config(spec, parallel, dtype)
    layer = copy.deepcopy(get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm"))
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = TreeCoreAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    here = spec.layers // parallel.pipeline
    model = TreeGPT(
        spec,
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * here, layer_norm=RmsNorm),
        vocab_size=spec.vocab,
        max_sequence_length=1,  # positions are explicit; there is no position table
        pre_process=parallel.first,
        post_process=parallel.last,
        position_embedding_type="none",
        share_embeddings_and_output_weights=spec.tied,
    ).to(parallel.device)
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def load_local(model: DistributedDataParallel, local: dict[str, Tensor]) -> None:
    """Copy a local state dict (hf_map.to_local) into the model; every parameter must be in it."""
    parameters = dict(model.module.named_parameters())
    if parameters.keys() != local.keys():
        raise ValueError(f"weights and model differ in {sorted(parameters.keys() ^ local.keys())}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(local[name])


def local_weights(model: DistributedDataParallel) -> dict[str, Tensor]:
    """The rank's weights by Megatron name (not copied)."""
    return {name: parameter.detach() for name, parameter in model.module.named_parameters()}
