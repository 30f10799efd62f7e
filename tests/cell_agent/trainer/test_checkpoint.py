"""Durable checkpoints: complete or not there, verified before use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from services.cell_agent.trainer import checkpoint
from services.cell_agent.trainer.checkpoint import CheckpointError
from services.cell_agent.trainer.parallel import Parallel

MODEL = {"layers": 2, "hidden": 8}


@pytest.fixture
def alone() -> Iterator[Parallel]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Parallel(0, 1, 1, 1, 1, 0, 0, 0, torch.device("cpu"), dist.group.WORLD)
    dist.destroy_process_group()


def state(value: float) -> dict[str, object]:
    return {"weights": {"w": torch.full((3,), value)}, "optimizer": {"step": int(value)}, "rng": torch.get_rng_state()}


def test_what_is_saved_is_loaded(tmp_path: Path, alone: Parallel) -> None:
    saved = state(1.0)
    checkpoint.save(tmp_path / "step", saved, 7, MODEL, alone)
    loaded, version = checkpoint.load(tmp_path / "step", MODEL, alone)
    assert version == 7
    assert torch.equal(loaded["weights"]["w"], torch.ones(3))
    assert torch.equal(loaded["rng"], saved["rng"])  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


def test_a_checkpoint_is_replaced_whole_and_leftovers_of_a_crash_do_not_matter(tmp_path: Path, alone: Parallel) -> None:
    for leftover in ("step.partial", "step.replaced"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "rank-00000.pt").write_bytes(b"half")
    checkpoint.save(tmp_path / "step", state(1.0), 1, MODEL, alone)
    checkpoint.save(tmp_path / "step", state(2.0), 2, MODEL, alone)
    loaded, version = checkpoint.load(tmp_path / "step", MODEL, alone)
    assert (version, float(loaded["weights"]["w"][0])) == (2, 2.0)
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


def test_damage_and_other_layouts_are_refused(tmp_path: Path, alone: Parallel) -> None:
    path = tmp_path / "step"
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoint.load(path, MODEL, alone)
    checkpoint.save(path, state(1.0), 1, MODEL, alone)
    with pytest.raises(CheckpointError, match="another model"):
        checkpoint.load(path, MODEL | {"layers": 3}, alone)
    file = path / "rank-00000.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path, MODEL, alone)
    file.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint.load(path, MODEL, alone)
    meta = json.loads((path / checkpoint.META).read_text())
    (path / checkpoint.META).write_text(json.dumps(meta | {"layout": {"tensor": 2, "pipeline": 1, "context": 1}}))
    with pytest.raises(CheckpointError, match="another layout"):
        checkpoint.load(path, MODEL, alone)
