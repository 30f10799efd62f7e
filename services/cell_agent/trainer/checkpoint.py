"""Durable checkpoints of the core: weights, optimizer, random state and version, one file per rank.

Invariant: a checkpoint folder that exists under its final name is complete. It is written beside it, every file and the
folder are forced to disk, then it is renamed; a load verifies each file's digest and the layout before using anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.cell_agent.trainer.parallel import Parallel

FORMAT = 1
META = "checkpoint.json"


class CheckpointError(Exception):
    """A checkpoint cannot be used: incomplete, damaged, or made by another layout or model."""


def save(path: Path, state: dict[str, Any], version: int, spec: dict[str, Any], parallel: Parallel) -> None:
    """Write this rank's `state`; on return the whole folder is durable under `path` (replacing what was there)."""
    aside = path.with_name(path.name + ".partial")
    if parallel.is_control:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier(parallel.control)
    name = f"rank-{parallel.rank:05d}.pt"
    with (aside / name).open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    digests: list[Any] = [None] * parallel.world
    dist.all_gather_object(digests, (name, _digest(aside / name)), parallel.control)
    if parallel.is_control:
        meta = {
            "format": FORMAT,
            "version": version,
            "layout": _layout(parallel),
            "model": spec,
            "files": dict(digests),
        }
        _write_durably(aside / META, json.dumps(meta, indent=1).encode())
        _sync_folder(aside)
        _replace(aside, path)
    dist.barrier(parallel.control)


def load(path: Path, spec: dict[str, Any], parallel: Parallel) -> tuple[dict[str, Any], int]:
    """This rank's state and the version. Raises CheckpointError."""
    meta_path = path / META
    if not meta_path.is_file():
        raise CheckpointError(f"{path} is not a checkpoint ({META} is missing); choose a folder that Save wrote")
    meta = json.loads(meta_path.read_text())
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {meta.get('format')}, this program reads {FORMAT}")
    for what, wanted in (("layout", _layout(parallel)), ("model", spec)):
        if meta[what] != wanted:
            raise CheckpointError(f"{path} was made with another {what}: {meta[what]} instead of {wanted}")
    name = f"rank-{parallel.rank:05d}.pt"
    if _digest(path / name) != meta["files"][name]:
        raise CheckpointError(f"{path / name} is damaged (digest differs); use the checkpoint before it")
    return torch.load(path / name, map_location="cpu", weights_only=True), int(meta["version"])


def _layout(parallel: Parallel) -> dict[str, int]:
    return {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}


def _digest(path: Path) -> str:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(aside: Path, path: Path) -> None:
    """Put `aside` under the name `path`; a folder of that name is moved away first and removed last."""
    old = path.with_name(path.name + ".replaced")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    aside.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)
