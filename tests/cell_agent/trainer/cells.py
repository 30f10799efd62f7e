"""Real training workers for tests: start them, train batches, look at what they publish."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from torch import Tensor

from services.cell_agent.trainer import protocol
from services.cell_agent.trainer.launcher import TrainerHandle, launch
from services.cell_agent.transfer.mooncake import TransferSession
from services.cell_agent.transfer.weights import Snapshots
from shared.config import RunConfig
from shared.microstep import MicroStep
from tests.cell_agent.trainer.forest import encode


@contextlib.asynccontextmanager
async def cell(config: RunConfig, folder: Path, number: int = 0) -> AsyncIterator[TrainerHandle]:
    handle = await launch(
        cell=number, config=config, run_dir=folder, log_path=folder / f"trainer-{number}.log", device="cpu"
    )
    try:
        yield handle
    finally:
        await handle.close()


async def load(handle: TrainerHandle, config: RunConfig, checkpoint: str = "") -> int:
    done = await handle.call(protocol.Load(id=0, hf_path=config.model.path, checkpoint=checkpoint))
    assert isinstance(done, protocol.Done)
    return int(done.metrics["version"])


async def train(handle: TrainerHandle, steps: Sequence[MicroStep], version: int) -> list[protocol.Trained]:
    """BeginBatch, all micro-steps queued ahead, EndBatch."""
    await handle.call(protocol.BeginBatch(id=0, batch=version + 1, attempt=1, version=version))
    calls = [handle.call(protocol.Train(id=0, payload=encode(step))) for step in steps]
    *trained, _ = await asyncio.gather(*calls, handle.call(protocol.EndBatch(id=0)))
    assert all(isinstance(reply, protocol.Trained) for reply in trained)
    return trained  # type: ignore[return-value]


async def step(handle: TrainerHandle, executions: int, version: int) -> dict[str, float]:
    done = await handle.call(protocol.Step(id=0, executions=executions, version=version))
    assert isinstance(done, protocol.Done)
    return done.metrics


async def publish(handle: TrainerHandle, version: int) -> protocol.Published:
    published = await handle.call(protocol.Publish(id=0, version=version))
    assert isinstance(published, protocol.Published)
    return published


async def pull(handle: TrainerHandle, published: protocol.Published, load: bool = True) -> dict[str, float]:
    done = await handle.call(
        protocol.Pull(
            id=0,
            session=published.session,
            address=published.address,
            nbytes=published.nbytes,
            tensors=published.tensors,
            digest=published.digest,
            chunk_bytes=published.chunk_bytes,
            chunks=published.chunks,
            version=published.version,
            load=load,
        )
    )
    assert isinstance(done, protocol.Done)
    return done.metrics


def read_snapshot(published: protocol.Published) -> dict[str, Tensor]:
    """The published weights, pulled over the Transfer Engine into this process."""
    session = TransferSession("127.0.0.1")
    snapshot, _ = Snapshots(session).pull(published)
    weights = {name: tensor.clone() for name, tensor in snapshot.views().items()}
    session.close()
    return weights


async def weights(handle: TrainerHandle, version: int) -> dict[str, Tensor]:
    return await asyncio.to_thread(read_snapshot, await publish(handle, version))


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
