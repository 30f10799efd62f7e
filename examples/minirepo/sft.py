"""Supervised training of the example policy: the architecture, the loss and the training loop.

Data-parallel over gloo processes that all see the same seed: each takes its own batches and gradients are averaged.
Contexts that open with the same tokens (system prompt and tools) share one forward over them, gradient included.
"""

import math
import random
import sys
import time
from dataclasses import dataclass

# transformers imports torchvision for image models if it is there, and fails if that one was built for another torch.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]

# ruff: noqa: E402
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicCache

Row = tuple[list[int], list[int]]  # ids and mask (1: to be produced) of one context


def make_model(vocabulary: int, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 1.7 M parameters, seeded."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
        rope_theta=10000.0,
        initializer_range=0.05,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config).float()


def masked_log_probs(model, ids: torch.Tensor, mask: torch.Tensor, opening: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the masked tokens of `ids` [rows, length], whose first `opening` tokens are the same in all rows.

    Returns (log-probs [n], whether each was the likeliest token [n]).
    """
    rows, length = ids.shape
    cache = DynamicCache(config=model.config)
    model.model(input_ids=ids[:1, :opening], past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys = layer.keys.expand(rows, -1, -1, -1)
        layer.values = layer.values.expand(rows, -1, -1, -1)
    positions = torch.arange(opening, length - 1)[None].expand(rows, -1)
    hidden = model.model(
        input_ids=ids[:, opening:-1], past_key_values=cache, use_cache=True, position_ids=positions
    ).last_hidden_state
    chosen = mask[:, opening + 1 :].bool()
    target = ids[:, opening + 1 :][chosen]
    log_probs = torch.log_softmax(model.lm_head(hidden[chosen]).float(), -1)
    return log_probs.gather(1, target[:, None])[:, 0], log_probs.argmax(-1) == target


class Batches:
    """Endless batches of rows that share their opening, of similar length, `tokens` padded tokens beyond it."""

    def __init__(self, groups: list[tuple[int, list[Row]]], tokens: int, rng: random.Random):
        self.groups, self.tokens, self.rng = groups, tokens, rng
        self.left: list[tuple[int, list[Row]]] = []

    def next(self) -> tuple[int, torch.Tensor, torch.Tensor]:
        """(opening, ids, mask)"""
        if not self.left:
            for opening, rows in self.groups:
                self.left += [(opening, batch) for batch in self._cut(opening, rows)]
            self.rng.shuffle(self.left)
        opening, rows = self.left.pop()
        return opening, *pad(rows)

    def _cut(self, opening: int, rows: list[Row]):
        order = sorted(rows, key=lambda row: len(row[0]) + self.rng.random() * 24)
        batch: list[Row] = []
        for row in order:
            if batch and (len(batch) + 1) * (max(len(r[0]) for r in [*batch, row]) - opening) > self.tokens:
                yield batch
                batch = []
            batch.append(row)
        yield batch


def pad(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows)
    return (
        torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows]),
        torch.tensor([mask + [0] * (width - len(mask)) for _, mask in rows]),
    )


@dataclass(frozen=True)
class Recipe:
    """How to train. `phases` are (share of the time, data set); the rate falls over the last 40 % of the time.

    `seconds` are CPU seconds of one process, so that a busy machine takes longer but trains no less. `tokens` bounds
    one process's batch, openings not counted.
    """

    seconds: float
    phases: tuple[tuple[float, str], ...] = ((0.35, "basics"), (0.2, "clean"), (0.45, "noisy"))
    matrix_rate: float = 0.02
    other_rate: float = 2e-3
    warmup_steps: int = 40
    tokens: int = 2048


def optimizers(model, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices, AdamW for the rest, each with its full rate."""
    inner = {n: p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n}
    rest = [p for n, p in model.named_parameters() if n not in inner]
    return [
        (
            torch.optim.Muon(list(inner.values()), lr=recipe.matrix_rate, momentum=0.95, weight_decay=0.01),
            recipe.matrix_rate,
        ),
        (torch.optim.AdamW(rest, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0), recipe.other_rate),
    ]


def train(model, data: dict[str, list[tuple[int, list[Row]]]], recipe: Recipe, rank: int, world: int, report) -> None:
    """Trains for the recipe's time. `data` maps a set's name to its (opening, rows) groups; rank 0 reports."""
    rng = random.Random(1000 + rank)
    feeds = {name: Batches(groups, recipe.tokens, rng) for name, groups in data.items()}
    parameters = list(model.parameters())
    pairs = optimizers(model, recipe)
    start, step = time.process_time(), 0
    while (done := _agreed((time.process_time() - start) / recipe.seconds, world)) < 1:
        opening, ids, mask = feeds[_phase(recipe, done)].next()
        decay = 1.0 if done < 0.6 else 0.5 + 0.5 * math.cos(math.pi * (done - 0.6) / 0.4)
        rate = decay * min(1, (step + 1) / recipe.warmup_steps)
        for optimizer, full in pairs:
            for group in optimizer.param_groups:
                group["lr"] = full * max(0.03, rate)
        log_probs, hits = masked_log_probs(model, ids, mask, opening)
        (-log_probs.mean()).backward()
        _average_gradients(parameters, world)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer, _ in pairs:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 50 == 0 and rank == 0:
            right = hits.float().mean().item()
            report(f"{done:.0%} step {step} loss {-log_probs.mean().item():.3f} right {right:.3f}")


def _agreed(done: float, world: int) -> float:
    """Rank 0's reckoning, so that all processes stop at the same step."""
    value = torch.tensor([done])
    if world > 1:
        dist.broadcast(value, 0)
    return value.item()


def _phase(recipe: Recipe, done: float) -> str:
    for share, name in recipe.phases:
        if done < share:
            return name
        done -= share
    return recipe.phases[-1][1]


def _average_gradients(parameters, world: int) -> None:
    if world == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    offset = 0
    for p in parameters:
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p) / world)
        offset += p.numel()
