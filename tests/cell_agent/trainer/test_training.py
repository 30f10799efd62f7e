"""Real Megatron workers against plain transformers and torch on the same micro-steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from services.cell_agent.trainer import protocol
from services.cell_agent.trainer.launcher import TrainerDied, TrainerFailed
from shared.microstep import MicroStep
from tests.cell_agent.trainer import cells
from tests.cell_agent.trainer.forest import encode, random_step, run_config, without_torchvision, write_model
from tests.cell_agent.trainer.reference import Reference

pytestmark = pytest.mark.megatron

# With an epsilon that dwarfs the gradient, Adam's first update is lr / eps * gradient: the gradient becomes visible.
GRADIENT = {"learning_rate": 1e7, "adam_eps": 1e7, "clip_grad": 0.0}


def batch(reference: Reference, seed: int, count: int = 3) -> list[MicroStep]:
    rng = np.random.default_rng(seed)
    return [reference.on_policy(random_step(f"s{seed}-{i}", rng), rng) for i in range(count)]


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("llama", False)])
async def test_gradients_equal_plain_torch(tmp_path: Path, family: str, tied: bool) -> None:
    """Tree forward, selected logits, loss and backward: 1e-5 of transformers on separate paths (qwen3:
    test_layouts)."""
    model = write_model(tmp_path / "model", family, tied)
    config = run_config(model, **GRADIENT)
    reference = Reference(model, config.training)
    steps = batch(reference, 7)
    before = reference.weights()
    wanted, loss = reference.gradients(steps, 5)
    async with cells.cell(config, tmp_path) as handle:
        await cells.load(handle, config)
        trained = await cells.train(handle, steps, 0)
        await cells.step(handle, 5, 1)
        after = await cells.weights(handle, 1)
    assert [t.micro_step for t in trained] == [s.micro_step for s in steps]
    assert abs(sum(t.metrics["loss"] for t in trained) - loss) < 1e-4
    clipped = [t.metrics["clipped"] for t in trained]
    assert 0 < sum(clipped) / len(clipped) < 1, "the case should have clipped and unclipped sequences"
    largest = max(float(g.abs().max()) for g in wanted.values())
    assert largest > 1e-2
    for name, gradient in wanted.items():
        assert float((before[name] - after[name] - gradient).abs().max()) < 1e-5 * max(1.0, largest), name


async def test_adam_with_warm_up_and_clipping_equals_torch_and_resumes_exactly(tmp_path: Path) -> None:
    """Three batches; weights within 1e-5 of torch. A checkpoint after the second, loaded into new workers, gives the
    same third batch bit for bit, and the exported folder is what transformers loads."""
    model = write_model(tmp_path / "model")
    config = run_config(model, learning_rate=1e-3, warmup_steps=4, clip_grad=0.5, adam_eps=1e-6)
    reference = Reference(model, config.training)
    batches = []
    for version in range(3):
        batches.append(batch(reference, version))
        reference.step(batches[-1], 6, version + 1)
    async with cells.cell(config, tmp_path) as handle:
        assert await cells.load(handle, config) == 0
        for version, steps in enumerate(batches):
            await cells.train(handle, steps, version)
            metrics = await cells.step(handle, 6, version + 1)
            assert metrics["learning_rate"] == pytest.approx(1e-3 * (version + 1) / 4)
            if version == 1:
                await handle.call(protocol.Save(id=0, path=str(tmp_path / "checkpoint")))
        uninterrupted = await cells.weights(handle, 3)
        await handle.call(protocol.Export(id=0, path=str(tmp_path / "exported"), hf_path=str(model)))
    assert cells.largest_difference(uninterrupted, reference.weights()) < 1e-5

    async with cells.cell(config, tmp_path) as handle:
        assert await cells.load(handle, config, str(tmp_path / "checkpoint")) == 2
        await cells.train(handle, batches[2], 2)
        await cells.step(handle, 6, 3)
        resumed = await cells.weights(handle, 3)
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in resumed)
    compare_export(tmp_path / "exported", uninterrupted, reference)


def compare_export(folder: Path, weights: dict[str, torch.Tensor], reference: Reference) -> None:
    without_torchvision()
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(p, weights[name]) for name, p in loaded.named_parameters())
    ids = torch.arange(20)[None]
    torch.testing.assert_close(loaded(ids).logits, reference.model(ids).logits, rtol=0, atol=1e-3)


async def test_bad_commands_are_refused_and_an_empty_batch_changes_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = run_config(model, **GRADIENT)
    start = Reference(model, config.training).weights()
    async with cells.cell(config, tmp_path) as handle:
        await cells.load(handle, config)
        await cells.train(handle, [], 0)
        await cells.step(handle, 4, 1)
        assert cells.largest_difference(await cells.weights(handle, 1), start) == 0.0
        with pytest.raises(TrainerFailed, match="does not answer") as failure:
            await handle.call(protocol.Refit(id=0, engine_url="http://127.0.0.1:9", version=1))
        assert not failure.value.fatal, "an engine that is away is no fault of the trainer"
        with pytest.raises(TrainerFailed, match="BeginBatch") as failure:
            await handle.call(protocol.Train(id=0, payload=encode(random_step("m", np.random.default_rng(0)))))
        assert failure.value.fatal
        outcome = await asyncio.wait_for(handle.exited, 20)
        assert not outcome.asked
        assert outcome.returncodes == (1,)
        assert "OutOfOrder" in outcome.log_tail
        with pytest.raises(TrainerDied, match="not running"):
            await handle.call(protocol.EndBatch(id=0))


async def test_a_batch_that_is_opened_again_starts_from_zero(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = run_config(model, **GRADIENT)
    reference = Reference(model, config.training)
    first, second = batch(reference, 1, 1), batch(reference, 2, 1)
    wanted, _ = reference.gradients(second, 4)
    start = reference.weights()
    async with cells.cell(config, tmp_path) as handle:
        await cells.load(handle, config)
        await cells.train(handle, first, 0)
        await cells.train(handle, second, 0)
        await cells.step(handle, 4, 1)
        again = await cells.weights(handle, 1)
    assert cells.largest_difference(again, {n: start[n] - wanted[n] for n in start}) < 2e-5
