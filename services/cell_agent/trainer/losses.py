"""The loss of the paper's GSPO adaptation, per loss entry.

Sources: GSPO (Group Sequence Policy Optimization) for the length-normalised sequence ratio and its clipping; QwenGyre
(arXiv 2609.33848) for token importance weights capped at 5, sequence clip 0.995..1.005, per-execution token averaging.

With logp_t the current and b_t the behaviour log-probability of entry t of sequence i, A_i its advantage:

    r_t = exp(logp_t - b_t)                      token importance ratio
    w_t = min(r_t, cap)                          token importance weight (no gradient)
    s_i = exp(mean over i's entries of (logp_t - b_t))
    c_i = 0 if (A_i > 0 and s_i > high) or (A_i < 0 and s_i < low) else 1
    loss = sum_i weight_i * c_i * sum_t  -A_i * w_t * exp(logp_t - stopgrad(logp_t))

The last factor is 1 in value and gives the gradient  d loss / d logp_t = -weight_i * c_i * A_i * w_t: the policy
gradient with a capped importance weight; a clipped sequence gives none. The division by the batch's executions
happens once, at the optimizer step, so that contributions of different micro-steps and cells simply add.

Invariant: the loss is a sum over entries; splitting a batch into micro-steps (whole sequences) changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

METRICS = ("loss", "entries", "sequences", "clipped", "ratio_mean", "kl", "entropy_estimate")


@dataclass(frozen=True)
class LossRule:
    cap: float = 5.0
    low: float = 0.995
    high: float = 1.005


@dataclass(frozen=True)
class Sequences:
    """Entry e belongs to sequence `of[e]`; per sequence its advantage, weight and number of entries."""

    of: Tensor  # int64 [L]
    advantage: Tensor  # [S]
    weight: Tensor  # [S]
    entries: Tensor  # [S], entries of the sequence in the whole micro-step


def gspo_loss(
    logp: Tensor,
    behaviour: Tensor,
    sequences: Sequences,
    rule: LossRule,
    across: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss (scalar with gradient) and the sums that `metrics` turns into means.

    `across` adds a per-sequence vector up over ranks that hold other entries of the same sequences (context
    parallelism). Entropy is estimated by mean -logp of sampled tokens; kl is the estimate r - 1 - log r of
    KL(behaviour || current), which is never negative."""
    current = logp.detach()
    delta = current - behaviour
    total = torch.zeros_like(sequences.advantage).index_add_(0, sequences.of, delta)
    if across is not None:
        total = across(total)
    s = torch.exp(total / sequences.entries.clamp(min=1))
    up, down = sequences.advantage > 0, sequences.advantage < 0
    clipped = (up & (s > rule.high)) | (down & (s < rule.low))
    scale = torch.where(clipped, torch.zeros_like(s), sequences.weight * sequences.advantage)
    ratio = torch.exp(delta)
    weight = ratio.clamp(max=rule.cap)
    loss = -(scale[sequences.of] * weight * torch.exp(logp - current)).sum()
    kl = torch.expm1(delta) - delta
    sums = torch.stack([loss.detach(), ratio.sum(), kl.sum(), -current.sum(), torch.ones_like(current).sum()])
    return loss, torch.cat([sums, clipped.sum()[None].to(sums), torch.ones_like(s).sum()[None].to(sums)])


def metrics(sums: Tensor) -> dict[str, float]:
    """Means over entries and sequences from the sums of `gspo_loss` (over one or more micro-steps)."""
    loss, ratio, kl, surprise, entries, clipped, sequences = (float(x) for x in sums)
    tokens, paths = max(entries, 1.0), max(sequences, 1.0)
    values = (loss, entries, sequences, clipped / paths, ratio / tokens, kl / tokens, surprise / tokens)
    return dict(zip(METRICS, values, strict=True))
