"""Claiming micro-steps of one attempt of one batch for one cell.

Invariants: a micro-step that this object had trained is never trained by it again, however often it is delivered; a
claim is acknowledged only by `settle`, which is called after BatchCommitted; until then it is heartbeated. After
`give_back` nothing is reported any more: what is still in the trainer counts for nothing, and its item goes to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.cell_agent.trainer import protocol
from shared import ids
from shared.blobs import BlobStore
from shared.bus import Bus, WorkItem, WorkQueue, WorkQueueGone
from shared.events import MicroStepReady, MicroStepTrained

log = logging.getLogger("gyre.claims")

ACK_WAIT_S = 10.0  # what a killed cell had claimed is claimed by others after this
MOST_CLAIMED = 100_000  # of one batch, by all cells together
TAKE_S = 0.5
TAKE_SEALED_S = 0.2
GIVE_BACK_S = 2.0
LOOK_AGAIN_S = 2.0  # when to look again at what another cell trains

Call = Callable[[protocol.Command], Awaitable[protocol.Reply]]


class NoMicroStep(RuntimeError):
    """The queue of a batch gave out something else, or a micro-step whose bytes are not there."""


def queue_name(batch: int, attempt: int) -> str:
    return f"micro-{batch}-{attempt}"


def queue_subject(run: str, batch: int) -> str:
    return ids.subject_filter(run, "trajectory", ids.batch_token(batch), "micro_step_ready")


async def forget_queues(bus: Bus, batch: int) -> None:
    """Delete the queues of all attempts of a batch whose claims are settled."""
    attempt = 1
    while await bus.queue_exists(queue_name(batch, attempt)):
        await bus.delete_work_queue(queue_name(batch, attempt))
        attempt += 1


@dataclass
class _Held:
    item: WorkItem
    beating: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)


class Claims:
    """One cell's claims. `call` reaches the trainer; `elsewhere(micro_step)` tells whether a live cell other than this
    one holds its gradient; `depth`: micro-steps in the trainer at once."""

    def __init__(
        self,
        *,
        bus: Bus,
        blobs: BlobStore,
        cell: int,
        incarnation: str,
        batch: int,
        attempt: int,
        depth: int,
        sealed: bool,
        call: Call,
        elsewhere: Callable[[str], bool],
    ) -> None:
        self.batch, self.attempt, self.sealed = batch, attempt, sealed
        self._bus, self._blobs, self._cell, self._incarnation = bus, blobs, cell, incarnation
        self._depth, self._call, self._elsewhere = depth, call, elsewhere
        self._held: dict[str, _Held] = {}
        self._training: dict[str, asyncio.Task[None]] = {}
        self._loop: asyncio.Future[None] | None = None
        self.trained: set[str] = set()  # into the gradients of this attempt
        self._ending = False  # claims nothing more
        self._void = False  # reports nothing more

    @property
    def held(self) -> frozenset[str]:
        return frozenset(self._held)

    async def run(self) -> None:
        """Claim and train until another method ends it, or the queue ends; raises what the trainer raises."""
        if self._ending:
            return
        self._loop = asyncio.ensure_future(self._claim_all())
        try:
            await self._loop
        except asyncio.CancelledError:
            if not self._ending:
                raise

    async def _claim_all(self) -> None:
        queue = await self._bus.work_queue(
            queue_name(self.batch, self.attempt),
            queue_subject(self._bus.run, self.batch),
            ack_wait_s=ACK_WAIT_S,
            max_in_flight=MOST_CLAIMED,
        )
        try:
            while True:
                await self._room()
                await self._claim(queue)
        except WorkQueueGone:
            log.info("batch %d attempt %d is over", self.batch, self.attempt)
        finally:
            await queue.close()

    async def _room(self) -> None:
        """Wait until the trainer can take one more; raise what went wrong in it."""
        while len(self._training) >= self._depth:
            await asyncio.wait(self._training.values(), return_when=asyncio.FIRST_COMPLETED)
            self._reap()
        self._reap()

    def _reap(self) -> None:
        for name, task in list(self._training.items()):
            if task.done():
                del self._training[name]
                task.result()

    async def _claim(self, queue: WorkQueue) -> None:
        item = await queue.take(TAKE_SEALED_S if self.sealed else TAKE_S)
        if item is None:
            if self.sealed and self._training:
                await self._call(protocol.EndBatch(id=0))
            return
        step = item.event
        if not isinstance(step, MicroStepReady):
            raise NoMicroStep(f"{queue.name} gave out {type(step).__name__}: its subject filter is wrong")
        elif step.micro_step in self._held:
            await self._hold(step.micro_step, item)  # delivered again, because the server missed our heartbeats
        elif self._elsewhere(step.micro_step):
            await item.nak(LOOK_AGAIN_S)  # its holder missed heartbeats; ours only if the holder dies
        else:
            await self._hold(step.micro_step, item)
            self._training[step.micro_step] = asyncio.create_task(self._train(step))

    async def _hold(self, name: str, item: WorkItem) -> None:
        before = self._held.get(name)
        held = self._held[name] = _Held(item)
        await held.beating.enter_async_context(item.heartbeat())
        if before is not None:
            await before.beating.aclose()

    async def _train(self, step: MicroStepReady) -> None:
        self.trained.add(step.micro_step)
        payload = step.payload if step.payload is not None else self._fetch(step)
        reply = await self._call(protocol.Train(id=0, payload=payload))
        if self._void:
            return
        if not isinstance(reply, protocol.Trained) or reply.micro_step != step.micro_step:
            raise NoMicroStep(f"the trainer answered {step.micro_step} with {reply}")
        event = MicroStepTrained(
            micro_step=step.micro_step,
            batch=self.batch,
            attempt=self.attempt,
            cell=self._cell,
            incarnation=self._incarnation,
            tokens=reply.tokens,
            seconds=reply.seconds,
            metrics=reply.metrics,
        )
        await self._bus.publish(event, msg_id=f"trained.{step.micro_step}.{self.attempt}.{self._incarnation}")

    def _fetch(self, step: MicroStepReady) -> bytes:
        if step.blob is None:
            raise NoMicroStep(f"{step.micro_step} carries neither a payload nor a blob")
        return self._blobs.get(step.blob)

    async def stop(self) -> None:
        """Claim nothing more; return when the trainer has answered for all that was claimed."""
        await self._end_loop()
        if self._training:
            await asyncio.wait(self._training.values())
            self._reap()

    async def settle(self, committed: tuple[str, ...]) -> None:
        """The batch is committed: acknowledge what is in it, give the rest back."""
        await self._end_loop()
        self._void = True
        members = set(committed)
        for name, held in list(self._held.items()):
            await (held.item.ack() if name in members else held.item.nak())
            await self._let_go(name)

    async def give_back(self) -> None:
        """The attempt is void: nothing of it is reported any more, every claim goes back at once."""
        self._void = True
        await self.settle(())
        await asyncio.gather(
            *self._training.values(), return_exceptions=True
        )  # what fails there is told by its watcher

    async def drop(self) -> None:
        """The cell is over: report nothing more, wait for no trainer, give the claims back if the server is there (else
        it gives them to others when they run out)."""
        self._void = True
        await self._end_loop()
        for task in self._training.values():
            task.cancel()
        await asyncio.gather(*self._training.values(), return_exceptions=True)
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await asyncio.gather(*(held.item.nak() for held in self._held.values()))
        except TimeoutError:
            log.warning("%d claims of batch %d run out by themselves", len(self._held), self.batch)
        for name in list(self._held):
            await self._let_go(name)

    async def _end_loop(self) -> None:
        self._ending = True
        if self._loop is not None and not self._loop.done():
            self._loop.cancel()
            await asyncio.wait([self._loop])

    async def _let_go(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            await held.beating.aclose()
