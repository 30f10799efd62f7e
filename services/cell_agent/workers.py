"""The cell's training workers, as the agent uses them: one method a deed, and what they hold at present.

Invariant: `version` is the policy version in the training model (-1: none), `pulled` version and digest of the snapshot
that can be put into an engine; both change only when the workers said that it is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.cell_agent.trainer import protocol
from services.cell_agent.trainer.launcher import TrainerFailed, TrainerHandle
from shared.events import WeightsPublished

log = logging.getLogger("gyre.cell")

PEER_TRIES = 20  # by then the stream tells that a peer is lost, and its snapshot valid no more
PEER_PAUSE_S = 1.0
PULL_S = 60.0  # a pull that takes longer than this ...
PULL_BYTES_PER_S = 50e6  # ... and than this slow a link would take is held up by a peer that hangs


class WrongReply(RuntimeError):
    """The trainer answered a command with something else than its protocol says."""


class Workers:
    def __init__(self, handle: TrainerHandle, cell: int, incarnation: str) -> None:
        self.handle, self._cell, self._incarnation = handle, cell, incarnation
        self.version = -1
        self.pulled = (-1, "")

    async def call(self, message: protocol.Command) -> protocol.Reply:
        return await self.handle.call(message)

    async def _done(self, message: protocol.Command) -> dict[str, float]:
        reply = await self.handle.call(message)
        if not isinstance(reply, protocol.Done):
            raise WrongReply(f"{type(message).__name__} was answered with {type(reply).__name__}")
        return reply.metrics

    async def load(self, hf_path: str, checkpoint: str, version: int) -> None:
        """Core: weights and optimizer of `version`; WrongReply if folder or checkpoint hold another one."""
        metrics = await self._done(protocol.Load(id=0, hf_path=hf_path, checkpoint=checkpoint))
        if int(metrics.get("version", version)) != version:
            raise WrongReply(f"{checkpoint or hf_path} holds version {metrics['version']:.0f}, not {version}")
        self.version = version

    async def snapshot(self, version: int) -> WeightsPublished:
        """Core: freeze the weights for others to read."""
        reply = await self.handle.call(protocol.Publish(id=0, version=version))
        if not isinstance(reply, protocol.Published):
            raise WrongReply(f"Publish was answered with {type(reply).__name__}")
        return WeightsPublished(
            version=reply.version,
            cell=self._cell,
            incarnation=self._incarnation,
            session=reply.session,
            address=reply.address,
            nbytes=reply.nbytes,
            tensors=reply.tensors,
            digest=reply.digest,
            chunk_bytes=reply.chunk_bytes,
            chunks=reply.chunks,
        )

    async def pull(
        self,
        weights: WeightsPublished,
        peers: Callable[[], tuple[str, ...]],
        valid: Callable[[WeightsPublished], bool],
        *,
        load: bool,
    ) -> dict[str, float] | None:
        """Satellite: get the core's snapshot, with `load` into the training model too. What it took (protocol.Pull);
        None if the snapshot is valid no more. `peers`: where other cells' offers are, at present."""
        if (weights.version, weights.digest) == self.pulled and (not load or weights.version == self.version):
            return {}
        command = protocol.Pull(
            id=0,
            session=weights.session,
            address=weights.address,
            nbytes=weights.nbytes,
            tensors=weights.tensors,
            digest=weights.digest,
            chunk_bytes=weights.chunk_bytes,
            chunks=weights.chunks,
            version=weights.version,
            load=load,
        )
        limit_s = PULL_S + weights.nbytes / PULL_BYTES_PER_S
        for left in range(PEER_TRIES, 0, -1):
            if not valid(weights):
                break
            try:
                async with asyncio.timeout(limit_s):
                    steps = await self._done(msgspec.structs.replace(command, peers=peers()))
            except TimeoutError as error:
                text = (
                    f"the pull of version {weights.version} from {weights.session} did not end within {limit_s:.0f} s"
                )
                raise TrainerFailed(f"{text}: that process hangs, or the network does", fatal=True) from error
            except TrainerFailed as error:
                if error.fatal or (left == 1 and valid(weights)):
                    raise
                log.warning("cell %d: pull of version %d failed: %s", self._cell, weights.version, error)
                await asyncio.sleep(PEER_PAUSE_S)
                continue
            self.pulled = (weights.version, weights.digest)
            if load:
                self.version = weights.version
            return steps
        return None

    async def push(self, engine_url: str, version: int) -> dict[str, float]:
        """Put the snapshot into the engine, which is left paused if that fails. What it took (protocol.Refit)."""
        return await self._done(protocol.Refit(id=0, engine_url=engine_url, version=version))

    async def begin(self, batch: int, attempt: int, version: int) -> None:
        await self._done(protocol.BeginBatch(id=0, batch=batch, attempt=attempt, version=version))

    async def drain(self) -> None:
        await self._done(protocol.EndBatch(id=0))

    async def reduce(self, group: str, rank: int, size: int, store: str) -> dict[str, float]:
        return await self._done(protocol.Reduce(id=0, group=group, rank=rank, size=size, store=store))

    async def step(self, executions: int, version: int) -> dict[str, float]:
        metrics = await self._done(protocol.Step(id=0, executions=executions, version=version))
        self.version = version
        return metrics

    async def save(self, folder: Path) -> dict[str, float]:
        return await self._done(protocol.Save(id=0, path=str(folder)))

    async def export(self, folder: Path, hf_path: str) -> None:
        await self._done(protocol.Export(id=0, path=str(folder), hf_path=hf_path))
