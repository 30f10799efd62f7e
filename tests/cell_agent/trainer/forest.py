"""Builders for trainer tests: tiny Hugging Face models, random token forests, and the micro-steps over them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared import microstep
from shared.config import CellsConfig, ModelConfig, RunConfig, TasksConfig, TrainingConfig
from shared.microstep import MicroStep, Segment, SequenceInfo

VOCAB = 96


@dataclass(frozen=True)
class Sizes:
    layers: int = 2
    hidden: int = 32
    ffn: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    vocab: int = VOCAB


def write_model(
    folder: Path, family: str = "qwen3", tied: bool = True, seed: int = 0, sizes: Sizes | None = None
) -> Path:
    """A random model of a family as a Hugging Face folder."""
    without_torchvision()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    s = sizes or Sizes()
    config_type, model_type = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    extra = {} if family == "qwen2" else {"head_dim": s.head_dim}
    torch.manual_seed(seed)
    config = config_type(
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=s.ffn,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        **extra,
    )
    model = model_type(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases start at constants, which would hide mistakes
                parameter.add_(0.2 * torch.randn_like(parameter))
            assert torch.isfinite(parameter).all(), name
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def without_torchvision() -> None:
    """transformers imports torchvision if it is there, and fails where that was built for another torch."""
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]


def run_config(model: Path, cells: CellsConfig | None = None, **training: object) -> RunConfig:
    return RunConfig(
        name="trainer-test",
        model=ModelConfig(path=str(model)),
        tasks=TasksConfig(train="unused"),
        cells=cells or CellsConfig(count=1),
        training=TrainingConfig(**training),  # type: ignore[arg-type]
    )


def random_step(
    name: str, rng: np.random.Generator, trees: int = 3, vocab: int = VOCAB, spread: float = 0.01
) -> MicroStep:
    """A random forest with shared prefixes, where a token may be trained by several sequences."""
    segments: list[Segment] = []
    tokens: list[int] = []
    for _ in range(trees):
        root = len(segments)
        for i in range(int(rng.integers(2, 6))):
            parent = -1 if i == 0 else root + int(rng.integers(0, i))
            length = int(rng.integers(1, 9)) + (2 if i == 0 else 0)
            segments.append(Segment(len(tokens), length, parent))
            tokens += [int(x) for x in rng.integers(0, vocab, length)]
    return attach_entries(name, rng, tokens, segments, spread)


def attach_entries(
    name: str, rng: np.random.Generator, tokens: list[int], segments: list[Segment], spread: float
) -> MicroStep:
    """Every leaf becomes a sequence that trains a random half of its path. Behaviour log-probabilities are set by
    `with_behaviour`, here only placeholders."""
    leaves = set(range(len(segments))) - {s.parent for s in segments}
    infos: list[SequenceInfo] = []
    entry_token: list[int] = []
    entry_sequence: list[int] = []
    for leaf in sorted(leaves):
        packed = packed_path(segments, leaf)
        chosen = [p for p in packed[1:] if rng.random() < 0.5] or packed[-1:]
        if chosen == packed[:1]:
            continue
        advantage = float(rng.normal())
        infos.append(SequenceInfo(f"x{leaf}", f"c{leaf}", advantage, 1.0 / (len(chosen) + 1), len(chosen)))
        entry_token += chosen
        entry_sequence += [len(infos) - 1] * len(chosen)
    return MicroStep(
        micro_step=name,
        batch=1,
        tokens=np.array(tokens, "<i4").tobytes(),
        segments=tuple(segments),
        sequences=tuple(infos),
        entry_token=np.array(entry_token, "<i4").tobytes(),
        entry_sequence=np.array(entry_sequence, "<i4").tobytes(),
        entry_logprob=(rng.normal(-4.0, spread, len(entry_token))).astype("<f4").tobytes(),
    )


def packed_path(segments: list[Segment] | tuple[Segment, ...], leaf: int) -> list[int]:
    """Packed indices of the tokens on the root-to-leaf path."""
    chain = []
    while leaf >= 0:
        chain.append(segments[leaf])
        leaf = segments[leaf].parent
    return [i for s in reversed(chain) for i in range(s.start, s.start + s.length)]


def sequences(step: MicroStep) -> list[tuple[list[int], list[int], np.ndarray]]:
    """Per sequence: ids of its path, places of the trained tokens on it, behaviour log-probabilities."""
    tokens = np.frombuffer(step.tokens, "<i4")
    entry_token = np.frombuffer(step.entry_token, "<i4")
    of = np.frombuffer(step.entry_sequence, "<i4")
    behaviour = np.frombuffer(step.entry_logprob, "<f4")
    owner = {i: k for k, s in enumerate(step.segments) for i in range(s.start, s.start + s.length)}
    result = []
    for number in range(len(step.sequences)):
        mine = np.nonzero(of == number)[0]
        last = max(entry_token[mine], key=lambda t: len(packed_path(step.segments, owner[int(t)])))
        path = packed_path(step.segments, owner[int(last)])
        place = {packed: k for k, packed in enumerate(path)}
        trained = [place[int(t)] for t in entry_token[mine]]
        result.append(([int(tokens[i]) for i in path], trained, behaviour[mine]))
    return result


def with_behaviour(step: MicroStep, logprobs: list[np.ndarray], rng: np.random.Generator, noise: float) -> MicroStep:
    """The step with behaviour log-probabilities near the given current ones (per sequence), so that ratios straddle the
    clip range."""
    of = np.frombuffer(step.entry_sequence, "<i4")
    values = np.empty(len(of), "<f4")
    for number, current in enumerate(logprobs):
        values[of == number] = current + rng.normal(0.0, noise, len(current)) + rng.normal(0.0, noise / 4)
    return MicroStep(**{f: getattr(step, f) for f in MicroStep.__struct_fields__} | {"entry_logprob": values.tobytes()})


def encode(step: MicroStep) -> bytes:
    return microstep.encode(step)
