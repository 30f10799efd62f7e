"""The same training in plain transformers and torch: each path on its own, the loss written out, torch's AdamW."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared.config import TrainingConfig
from shared.microstep import MicroStep
from tests.cell_agent.trainer.forest import sequences, with_behaviour, without_torchvision


class Reference:
    def __init__(self, folder: Path, training: TrainingConfig) -> None:
        without_torchvision()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.training = training
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            weight_decay=0.0,
        )

    def logp(self, ids: list[int], trained: list[int]) -> Tensor:
        logits = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return torch.stack([logits[place - 1, ids[place]] for place in trained])

    def on_policy(self, step: MicroStep, rng: np.random.Generator, noise: float = 0.03) -> MicroStep:
        """The step with behaviour log-probabilities close to this model's."""
        with torch.no_grad():
            current = [self.logp(ids, trained).numpy() for ids, trained, _ in sequences(step)]
        return with_behaviour(step, current, rng, noise)

    def gradients(self, steps: list[MicroStep], executions: int) -> tuple[dict[str, Tensor], float]:
        """Gradients of the batch loss, and the loss."""
        self.model.zero_grad()
        total = 0.0
        for step in steps:
            for info, (ids, trained, behaviour) in zip(step.sequences, sequences(step), strict=True):
                logp = self.logp(ids, trained)
                delta = logp.detach().double() - torch.tensor(behaviour).double()
                s = math.exp(float(delta.mean()))
                high, low = self.training.sequence_clip_high, self.training.sequence_clip_low
                if (info.advantage > 0 and s > high) or (info.advantage < 0 and s < low):
                    continue
                weight = delta.exp().clamp(max=self.training.token_weight_cap).float()
                loss = -(info.weight * info.advantage * weight * torch.exp(logp - logp.detach())).sum()
                (loss / executions).backward()
                total += float(loss.detach())
        zero = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        return {n: p.grad if p.grad is not None else zero[n] for n, p in self.model.named_parameters()}, total

    def step(self, steps: list[MicroStep], executions: int, version: int) -> None:
        self.gradients(steps, executions)
        if self.training.clip_grad > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip_grad)
        warm = min(1.0, version / self.training.warmup_steps) if self.training.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.learning_rate * warm
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}
