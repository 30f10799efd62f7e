"""Tensor, pipeline and context parallel workers, and several cells, train what one process trains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from services.cell_agent.trainer import protocol
from services.cell_agent.trainer.launcher import TrainerHandle
from shared.config import CellsConfig
from shared.microstep import MicroStep
from tests.cell_agent.trainer import cells
from tests.cell_agent.trainer.forest import encode, random_step, run_config, write_model
from tests.cell_agent.trainer.reference import Reference

pytestmark = pytest.mark.megatron

GRADIENT = {"learning_rate": 1e7, "adam_eps": 1e7, "clip_grad": 0.0}


def batch(model: Path, count: int) -> tuple[list[MicroStep], dict[str, torch.Tensor]]:
    """Micro-steps of different lengths, and the weights after one update by the plain gradient."""
    config = run_config(model, **GRADIENT)
    reference = Reference(model, config.training)
    rng = np.random.default_rng(3)
    steps = [reference.on_policy(random_step(f"s{i}", rng, trees=1 + i % 3), rng) for i in range(count)]
    gradients, _ = reference.gradients(steps, 9)
    before = reference.weights()
    return steps, {name: before[name] - gradients[name] for name in before}


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        ({"tensor_parallel": 2}, True),
        ({"pipeline_parallel": 2}, True),
        ({"context_parallel": 2}, False),
    ],
    ids=["tp2", "pp2", "cp2"],
)
async def test_parallel_layouts_equal_one_process(tmp_path: Path, layout: dict[str, int], tied: bool) -> None:
    """Five micro-steps of different lengths through one stream, with a checkpoint round trip in the layout."""
    model = write_model(tmp_path / "model", tied=tied)
    steps, wanted = batch(model, 5)
    config = run_config(model, CellsConfig(count=1, **layout), **GRADIENT)
    async with cells.cell(config, tmp_path) as handle:
        await cells.load(handle, config)
        await handle.call(protocol.Save(id=0, path=str(tmp_path / "checkpoint")))
        assert await cells.load(handle, config, str(tmp_path / "checkpoint")) == 0
        await cells.train(handle, steps[:2], 0)
        rest = [handle.call(protocol.Train(id=0, payload=encode(s))) for s in steps[2:]]
        await asyncio.gather(*rest)  # a stream may end and start anew within a batch; Step ends it too
        metrics = await cells.step(handle, 9, 1)
        found = await cells.weights(handle, 1)
    assert metrics["skipped"] == 0.0
    assert cells.largest_difference(found, wanted) < 2e-5


async def contribute(handle: TrainerHandle, rank: int, store: str) -> None:
    await handle.call(protocol.Reduce(id=0, group="inc-a+inc-b", rank=rank, size=2, store=store))


async def test_two_cells_equal_one(tmp_path: Path) -> None:
    """A satellite pulls the core's weights, trains part of the batch, and its gradients are added to the core's; the
    group is used again for the next batch."""
    model = write_model(tmp_path / "model")
    steps, wanted = batch(model, 5)
    config = run_config(model, CellsConfig(count=2), **GRADIENT)
    async with cells.cell(config, tmp_path, 0) as core, cells.cell(config, tmp_path, 1) as satellite:
        await cells.load(core, config)
        assert satellite.hello.store == ""
        for version in range(2):
            times = await cells.pull(satellite, await cells.publish(core, version))
            assert times.keys() >= {"pull_s", "verify_s", "load_s"}
            await asyncio.gather(cells.train(core, steps[:2], version), cells.train(satellite, steps[2:], version))
            await asyncio.gather(contribute(core, 0, core.hello.store), contribute(satellite, 1, core.hello.store))
            await cells.step(core, 9, version + 1)
            if version == 0:
                assert cells.largest_difference(await cells.weights(core, 1), wanted) < 2e-5
        found = await cells.weights(core, 2)
    assert cells.largest_difference(found, twice(model, steps)) < 5e-5


def twice(model: Path, steps: list[MicroStep]) -> dict[str, torch.Tensor]:
    """The weights after two updates with the same batch, by plain torch in one process."""
    reference = Reference(model, run_config(model, **GRADIENT).training)
    for version in (1, 2):
        reference.step(steps, 9, version)
    return reference.weights()
