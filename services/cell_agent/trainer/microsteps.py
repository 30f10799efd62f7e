"""From the bytes of a micro-step to the tensors one rank computes with.

Invariant: every loss entry of the micro-step is computed by exactly one context-parallel rank (the one that holds the
token's parent), and a micro-step that contradicts itself is refused before anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from services.cell_agent.trainer.losses import Sequences
from services.cell_agent.trainer.tree_attention import TreeMask, padded, tree_layout, tree_mask
from shared import microstep
from shared.microstep import MicroStep


class MicroStepError(Exception):
    """A micro-step whose parts do not fit together."""


@dataclass(frozen=True)
class Prepared:
    """`rows` are local hidden states that become logits, `targets` the token each must predict, `entry_row` maps this
    rank's entries to rows."""

    micro_step: str
    size: int  # tokens without padding
    tokens: Tensor  # int64 [T / context]
    positions: Tensor  # int64 [T / context]
    mask: TreeMask
    rows: Tensor  # int64 [R]
    targets: Tensor  # int64 [R]
    entry_row: Tensor  # int64 [L]
    behaviour: Tensor  # float32 [L]
    sequences: Sequences


def prepare(
    payload: bytes, vocab: int, context: int = 1, context_rank: int = 0, device: torch.device | str = "cpu"
) -> Prepared:
    """Decode and check a micro-step, and take this context rank's share. Raises MicroStepError or TreeError."""
    try:
        step = microstep.decode(payload)
    except msgspec.MsgspecError as error:
        raise MicroStepError(f"a micro-step that cannot be decoded: {error}") from error
    tokens = np.frombuffer(step.tokens, "<i4").astype(np.int64)
    of = np.frombuffer(step.entry_sequence, "<i4").astype(np.int64)
    entry_token = np.frombuffer(step.entry_token, "<i4").astype(np.int64)
    behaviour = np.frombuffer(step.entry_logprob, "<f4")
    layout = tree_layout(step.segments, len(tokens))
    _check(step, tokens, entry_token, of, behaviour, layout.parents, vocab)
    total = -(-len(tokens) // context) * context
    layout = padded(layout, total)
    here = total // context
    low = context_rank * here
    parent = layout.parents[entry_token]
    mine = (parent >= low) & (parent < low + here)
    distinct, entry_row = np.unique(entry_token[mine], return_inverse=True)
    all_tokens = np.concatenate([tokens, np.zeros(total - len(tokens), np.int64)])

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    def per_sequence(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Prepared(
        micro_step=step.micro_step,
        size=len(tokens),
        tokens=tensor(all_tokens[low : low + here]),
        positions=tensor(layout.positions[low : low + here]),
        mask=tree_mask(layout, low, here),
        rows=tensor(layout.parents[distinct] - low),
        targets=tensor(tokens[distinct]),
        entry_row=tensor(entry_row),
        behaviour=tensor(behaviour[mine]),
        sequences=Sequences(
            of=tensor(of[mine]),
            advantage=per_sequence([s.advantage for s in step.sequences]),
            weight=per_sequence([s.weight for s in step.sequences]),
            entries=per_sequence([float(s.entries) for s in step.sequences]),
        ),
    )


def _check(
    step: MicroStep,
    tokens: np.ndarray,
    entry_token: np.ndarray,
    of: np.ndarray,
    behaviour: np.ndarray,
    parents: np.ndarray,
    vocab: int,
) -> None:
    def refuse(why: str) -> None:
        raise MicroStepError(f"micro-step {step.micro_step}: {why}")

    if not len(entry_token) == len(of) == len(behaviour):
        refuse(f"{len(entry_token)} entry tokens, {len(of)} sequence indices, {len(behaviour)} log-probabilities")
    if ((tokens < 0) | (tokens >= vocab)).any():
        refuse(f"token ids outside the model's vocabulary of {vocab}")
    if len(entry_token) and (entry_token.min() < 0 or entry_token.max() >= len(tokens)):
        refuse("an entry points outside the tokens")
    if (parents[entry_token] < 0).any():
        refuse("an entry is the first token of its path; nothing predicts it")
    counts = np.bincount(of[of >= 0], minlength=len(step.sequences)) if len(of) else np.zeros(len(step.sequences))
    if (of < 0).any() or list(counts) != [s.entries for s in step.sequences]:
        refuse("the entries per sequence are not what the sequences say")
    numbers = [x for s in step.sequences for x in (s.advantage, s.weight)]
    if not (np.isfinite(behaviour).all() and np.isfinite(numbers).all()):
        refuse("log-probabilities, advantages and weights must be finite")
