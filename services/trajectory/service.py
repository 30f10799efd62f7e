"""Shell of the trajectory service: the core on the run's stream, large micro-steps in the blob store.

Invariants: what is published depends on the stream alone (a blob's reference is the digest of its bytes, so it is known
without any store); a blob is durable before the event that names it is published. A store that fails ends the process:
the next one plays the stream again and finds the blob still missing. It never turns an event into a dead letter.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.trajectory.core import TrajectoryCore
from shared.actor import Core, Effect, Publish
from shared.blobs import BlobStore, digest_of
from shared.events import BlobRef, Event, MicroStepReady
from shared.runtime import ServiceContext, drive

SNAPSHOT_EVERY = 20_000
"""Events between two snapshots: what a restarted process plays again at most. A snapshot holds all unconsumed trees."""


class Externalised:
    """A core whose micro-step payloads above `threshold` bytes leave the event for the blob store.

    `handle` only names the blobs and keeps their bytes in `outbox`; `store` writes them. Blobs that are there already
    (a replay of history) are not kept."""

    def __init__(self, core: Core, blobs: BlobStore, threshold: int) -> None:
        self.core = core
        self.blobs = blobs
        self.threshold = threshold
        self.outbox: list[bytes] = []

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        return [self._outside(effect) for effect in self.core.handle(event, now)]

    def snapshot(self) -> bytes:
        return self.core.snapshot()

    def restore(self, data: bytes) -> None:
        self.core = TrajectoryCore.restore(data)

    def store(self) -> None:
        """Make the blobs of all effects so far durable."""
        while self.outbox:
            self.blobs.put(self.outbox[-1])
            self.outbox.pop()

    def _outside(self, effect: Effect) -> Effect:
        if not isinstance(effect, Publish) or not isinstance(effect.event, MicroStepReady):
            return effect
        payload = effect.event.payload
        if payload is None or len(payload) <= self.threshold:
            return effect
        ref = BlobRef(digest_of(payload), len(payload))
        if not self.blobs.has(ref):
            self.outbox.append(payload)
        return Publish(msgspec.structs.replace(effect.event, payload=None, blob=ref))


async def serve(ctx: ServiceContext) -> None:
    core = Externalised(TrajectoryCore(), ctx.blobs, ctx.config.bus.blob_threshold_bytes)
    # `observe` runs between a handled event and its first publish, in history as well.
    await drive(ctx, core, observe=lambda _message: core.store(), snapshot_every=SNAPSHOT_EVERY)
