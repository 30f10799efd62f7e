"""Hugging Face weights <-> Megatron weights of one (tensor, pipeline) rank, as pure functions on state dicts.

Invariant: `assemble` is the exact inverse of `to_local` over all places of a layout: every bit comes back, and each
full tensor is the very tensor Hugging Face names (fused projections are taken apart, tied output weights are not
repeated).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.cell_agent.trainer.model_spec import ModelSpec

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class WeightsError(Exception):
    """A weight is missing, has the wrong shape, or does not belong to the model."""


@dataclass(frozen=True)
class Place:
    """One rank's part: tensor slice `tensor_rank` of `tensor`, layers [start, end), and which ends of the model."""

    tensor: int
    tensor_rank: int
    start: int
    end: int
    first: bool
    last: bool

    @classmethod
    def of(cls, layers: int, tensor: int, tensor_rank: int, pipeline: int, pipeline_rank: int) -> Place:
        each = layers // pipeline
        start = pipeline_rank * each
        return cls(tensor, tensor_rank, start, start + each, pipeline_rank == 0, pipeline_rank == pipeline - 1)


def places(layers: int, tensor: int, pipeline: int) -> list[Place]:
    """All places of a layout."""
    ranks = itertools.product(range(pipeline), range(tensor))
    return [Place.of(layers, tensor, t, pipeline, p) for p, t in ranks]


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model's Hugging Face state dict, in snapshot order."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab, spec.hidden)}
    for i in range(spec.layers):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (spec.hidden,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, spec.hidden)
            if spec.qkv_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        if spec.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (spec.head_dim,)
        shapes[layer + "self_attn.o_proj.weight"] = (spec.hidden, q)
        shapes[layer + "post_attention_layernorm.weight"] = (spec.hidden,)
        shapes[layer + "mlp.gate_proj.weight"] = (spec.ffn, spec.hidden)
        shapes[layer + "mlp.up_proj.weight"] = (spec.ffn, spec.hidden)
        shapes[layer + "mlp.down_proj.weight"] = (spec.hidden, spec.ffn)
    shapes[NORM] = (spec.hidden,)
    if not spec.tied:
        shapes[HEAD] = (spec.vocab, spec.hidden)
    return shapes


def to_local(spec: ModelSpec, place: Place, hf: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The Megatron state dict of one place (views of `hf` where possible)."""
    local: dict[str, Tensor] = {}
    if place.first:
        local["embedding.word_embeddings.weight"] = _part(hf[EMBEDDING], place, 0)
    for i in range(place.start, place.end):
        hf_layer, layer = f"model.layers.{i}.", f"decoder.layers.{i - place.start}."
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            parts = [hf[f"{hf_layer}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            local[f"{layer}self_attention.linear_qkv.{kind}"] = _part(_fuse_qkv(spec, *parts), place, 0)
        for name, hf_name in _plain(spec):
            local[layer + name] = hf[hf_layer + hf_name]
        local[layer + "self_attention.linear_proj.weight"] = _part(hf[hf_layer + "self_attn.o_proj.weight"], place, 1)
        halves = [_part(hf[f"{hf_layer}mlp.{x}_proj.weight"], place, 0) for x in ("gate", "up")]
        local[layer + "mlp.linear_fc1.weight"] = torch.cat(halves)
        local[layer + "mlp.linear_fc2.weight"] = _part(hf[hf_layer + "mlp.down_proj.weight"], place, 1)
    if place.last:
        local["decoder.final_layernorm.weight"] = hf[NORM]
        if not (spec.tied and place.first):
            local["output_layer.weight"] = _part(hf[EMBEDDING if spec.tied else HEAD], place, 0)
    return local


def assemble(spec: ModelSpec, shards: Mapping[Place, Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The full Hugging Face tensors, in the order of `hf_shapes`, from the local state dicts of all places."""
    stages: dict[int, list[Mapping[str, Tensor]]] = {}
    for place in sorted(shards, key=lambda p: (p.start, p.tensor_rank)):
        stages.setdefault(place.start, []).append(shards[place])
    ordered = list(stages.items())
    yield EMBEDDING, _join(ordered[0][1], "embedding.word_embeddings.weight", 0)
    for start, ranks in ordered:
        count = sum(name.endswith("input_layernorm.weight") for name in ranks[0])
        for i in range(count):
            yield from _layer(spec, ranks, f"decoder.layers.{i}.", f"model.layers.{start + i}.")
    yield NORM, ordered[-1][1][0]["decoder.final_layernorm.weight"]
    if not spec.tied:
        yield HEAD, _join(ordered[-1][1], "output_layer.weight", 0)


def _layer(
    spec: ModelSpec, ranks: list[Mapping[str, Tensor]], layer: str, hf_layer: str
) -> Iterator[tuple[str, Tensor]]:
    found: dict[str, Tensor] = {name: ranks[0][layer + local] for local, name in _plain(spec)}
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        qkv = _split_qkv(spec, _join(ranks, f"{layer}self_attention.linear_qkv.{kind}", 0))
        found |= {f"self_attn.{x}_proj.{kind}": part for x, part in zip("qkv", qkv, strict=True)}
    found["self_attn.o_proj.weight"] = _join(ranks, layer + "self_attention.linear_proj.weight", 1)
    halves = [rank[layer + "mlp.linear_fc1.weight"].chunk(2, 0) for rank in ranks]
    found["mlp.gate_proj.weight"] = torch.cat([h[0] for h in halves])
    found["mlp.up_proj.weight"] = torch.cat([h[1] for h in halves])
    found["mlp.down_proj.weight"] = _join(ranks, layer + "mlp.linear_fc2.weight", 1)
    for name in hf_shapes(spec):
        if name.startswith(hf_layer):
            yield name, found[name[len(hf_layer) :]]


def _plain(spec: ModelSpec) -> list[tuple[str, str]]:
    """Per layer: tensors that are the same on every tensor rank (Megatron name, Hugging Face name)."""
    names = [
        ("input_layernorm.weight", "input_layernorm.weight"),
        ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ]
    if spec.qk_norm:
        names += [(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight") for x in "qk"]
    return names


def _fuse_qkv(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Megatron keeps, per key-value group, the group's queries, then its key, then its value."""
    rest = q.shape[1:]
    grouped = [x.reshape(spec.kv_heads, -1, *rest) for x in (q, k, v)]
    return torch.cat(grouped, 1).reshape(-1, *rest)


def _split_qkv(spec: ModelSpec, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rest = qkv.shape[1:]
    sizes = [spec.heads // spec.kv_heads * spec.head_dim, spec.head_dim, spec.head_dim]
    q, k, v = qkv.reshape(spec.kv_heads, -1, *rest).split(sizes, 1)
    return q.reshape(-1, *rest), k.reshape(-1, *rest), v.reshape(-1, *rest)


def _part(tensor: Tensor, place: Place, dim: int) -> Tensor:
    return tensor if place.tensor == 1 else tensor.chunk(place.tensor, dim)[place.tensor_rank]


def _join(ranks: list[Mapping[str, Tensor]], name: str, dim: int) -> Tensor:
    return ranks[0][name] if len(ranks) == 1 else torch.cat([rank[name] for rank in ranks], dim)


def read_folder(spec: ModelSpec, folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder (one file or sharded), checked against the spec. Raises WeightsError."""
    from safetensors import safe_open

    root = Path(folder)
    index = root / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else []
    found: dict[str, Tensor] = {}
    for file in files or ["model.safetensors"]:
        if not (root / file).is_file():
            raise WeightsError(f"{root / file} does not exist; model.path must hold safetensors weights")
        with safe_open(root / file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    check_weights(spec, found, str(root))
    return {name: found[name] for name in hf_shapes(spec)}


def check_weights(spec: ModelSpec, weights: Mapping[str, Any], source: str) -> None:
    """Raise WeightsError unless `weights` has every tensor of the model in its shape."""
    for name, shape in hf_shapes(spec).items():
        if name not in weights:
            raise WeightsError(f"{source} lacks the tensor {name}")
        if tuple(weights[name].shape) != shape:
            raise WeightsError(f"{source}: {name} has shape {tuple(weights[name].shape)}, config.json says {shape}")
