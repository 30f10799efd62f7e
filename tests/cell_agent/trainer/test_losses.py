"""The loss against its formula, written out sequence by sequence in float64."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cell_agent.trainer.losses import LossRule, Sequences, gspo_loss, metrics

RULE = LossRule(cap=5.0, low=0.995, high=1.005)


def case(seed: int, sequences: int = 6, noise: float = 0.01) -> tuple[torch.Tensor, torch.Tensor, Sequences]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 8, sequences)
    of = rng.permutation(np.repeat(np.arange(sequences), counts))
    logp = torch.tensor(rng.normal(-2, 1, len(of)), dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor(logp.detach().numpy() + rng.normal(0, noise, len(of)))
    behaviour[0] -= 3.0  # one token beyond the cap
    double = {"dtype": torch.float64}
    sizes = torch.tensor(counts, **double)
    info = Sequences(torch.tensor(of), torch.tensor(rng.normal(0, 1, sequences), **double), 1 / (sizes + 1), sizes)
    return logp, behaviour, info


def by_hand(logp: torch.Tensor, behaviour: torch.Tensor, info: Sequences) -> tuple[float, list[float], int]:
    """Value, gradient per entry and number of clipped sequences, straight from the formula."""
    value, gradient, clipped = 0.0, [0.0] * len(logp), 0
    logp = logp.detach()
    for i, (a, weight) in enumerate(zip(info.advantage.tolist(), info.weight.tolist(), strict=True)):
        mine = [t for t in range(len(logp)) if int(info.of[t]) == i]
        delta = [float(logp[t]) - float(behaviour[t]) for t in mine]
        s = math.exp(sum(delta) / len(delta))
        if (a > 0 and s > RULE.high) or (a < 0 and s < RULE.low):
            clipped += 1
            continue
        for t, d in zip(mine, delta, strict=True):
            w = min(math.exp(d), RULE.cap)
            value -= weight * a * w
            gradient[t] -= weight * a * w
    return value, gradient, clipped


@settings(deadline=None)
@given(st.integers(0, 100_000), st.sampled_from([0.001, 0.01, 0.5]))
def test_loss_and_gradient_are_the_formula(seed: int, noise: float) -> None:
    logp, behaviour, info = case(seed, noise=noise)
    loss, sums = gspo_loss(logp, behaviour, info, RULE)
    (gradient,) = torch.autograd.grad(loss, logp)
    value, wanted, clipped = by_hand(logp, behaviour, info)
    assert abs(float(loss.detach()) - value) < 1e-12
    assert np.abs(gradient.numpy() - wanted).max() < 1e-12
    found = metrics(sums)
    assert found["clipped"] == clipped / len(info.weight)
    assert found["entries"] == len(logp)
    assert found["kl"] >= 0.0
    assert abs(found["entropy_estimate"] + float(logp.detach().mean())) < 1e-12


@settings(deadline=None)
@given(st.integers(0, 100_000))
def test_micro_steps_of_whole_sequences_add_up(seed: int) -> None:
    logp, behaviour, info = case(seed)
    whole, sums = gspo_loss(logp, behaviour, info, RULE)
    parts = []
    for half in (range(0, 3), range(3, 6)):
        keep = torch.tensor([int(i) in half for i in info.of])
        which = torch.tensor(list(half))
        part = Sequences(info.of[keep] - half[0], info.advantage[which], info.weight[which], info.entries[which])
        parts.append(gspo_loss(logp[keep], behaviour[keep], part, RULE))
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts[0][1] + parts[1][1], sums, rtol=0, atol=1e-9)


def test_clipping_stops_only_the_direction_that_leads_further() -> None:
    behaviour = torch.tensor([-1.0], dtype=torch.float64)

    def contributes(advantage: float, ratio: float) -> bool:
        logp = (behaviour + math.log(ratio)).requires_grad_()
        one = torch.ones(1, dtype=torch.float64)
        info = Sequences(torch.tensor([0]), advantage * one, one, one)
        (gradient,) = torch.autograd.grad(gspo_loss(logp, behaviour, info, RULE)[0], logp)
        return bool(gradient.abs().sum() > 0)

    assert not contributes(1.0, 1.01)
    assert contributes(-1.0, 1.01)
    assert not contributes(-1.0, 0.99)
    assert contributes(1.0, 0.99)
    assert contributes(1.0, 1.004)
    assert contributes(-1.0, 0.996)


def test_a_huge_ratio_stays_finite() -> None:
    logp = torch.tensor([-0.1], requires_grad=True)
    one = torch.ones(1)
    loss, _ = gspo_loss(logp, torch.tensor([-500.0]), Sequences(torch.tensor([0]), -one, one, one), RULE)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert float(gradient) == 5.0
