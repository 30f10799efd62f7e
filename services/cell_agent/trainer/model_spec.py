"""What the trainer knows of a model: the sizes and switches of a dense Hugging Face decoder, read from config.json.

Invariant: a ModelSpec describes a model that `model.py` computes exactly; anything it would compute differently (scaled
RoPE, sliding windows, experts, output biases) is refused here by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelUnsupported(Exception):
    """The model's config.json asks for something the trainer does not compute."""


@dataclass(frozen=True)
class ModelSpec:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    norm_eps: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool

    def check_layout(self, tensor: int, pipeline: int) -> None:
        """Raise ModelUnsupported if the model cannot be cut into this many tensor and pipeline ranks."""
        for what, value in (
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("ffn", self.ffn),
            ("vocab", self.vocab),
        ):
            if value % tensor:
                raise ModelUnsupported(
                    f"cells.tensor_parallel={tensor} does not divide the model's {what}={value}; choose a divisor"
                )
        if self.layers % pipeline:
            raise ModelUnsupported(
                f"cells.pipeline_parallel={pipeline} does not divide the model's layers={self.layers}; choose a divisor"
            )


def read_spec(folder: str | Path) -> ModelSpec:
    """ModelSpec from <folder>/config.json. Raises ModelUnsupported."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelUnsupported(f"{path} does not exist; model.path must be a Hugging Face folder")
    config = json.loads(path.read_text())
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture not in ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"):
        raise ModelUnsupported(
            f"{path}: architecture {architecture} is not supported; use a dense Qwen3, Qwen2 or Llama"
        )
    _refuse(path, config)
    heads = config["num_attention_heads"]
    return ModelSpec(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        rope_theta=_rope_theta(path, config),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        qkv_bias=architecture == "Qwen2ForCausalLM",
    )


def _refuse(path: Path, config: dict[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelUnsupported(f"{path}: hidden_act={config['hidden_act']}; only silu is supported")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            raise ModelUnsupported(f"{path}: {key}=true is not supported")


def _rope_theta(path: Path, config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelUnsupported(f"{path}: RoPE scaling '{kind}' is not supported; only the default")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
