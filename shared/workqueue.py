"""Work that exactly one taker does at a time: a shared durable consumer on the run's stream.

Invariants: an item is delivered to one taker; it comes back (to anybody) when its taker lets `ack_wait_s` pass without
a heartbeat, naks it, or dies; it does not come back after `ack` returned, unless the server is killed just then. So an
item can be worked on twice: the work must end in an event whose message id is derived from the item, which is stored
once, and a taker that finds the result in the stream already has nothing to do but `ack`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.events import Event
from shared.pull import delivery_of, request_body, status_of
from shared.stored import Stored, stored

log = logging.getLogger("gyre.bus")

SLICE_S = 10.0  # longest single pull request: bounds what a lost one costs
GRACE_S = 1.0
ACK_TRY_S = 2.0


class WorkQueueGone(RuntimeError):
    """The queue was deleted (its batch is over): stop taking from it."""


T = TypeVar("T")
Outcome: TypeAlias = Msg | Literal["expired", "broken", "again"]


@dataclass(frozen=True)
class QueueState:
    delivered: int  # highest sequence of the stream that was delivered, as far as the server knows


class QueueBus(Protocol):
    """What a queue needs of its bus."""

    client: Client
    stream: str

    async def until_done(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T: ...

    async def queue_state(self, name: str) -> QueueState | None: ...

    async def publish_dead_letter(
        self, message: Stored, reason: str, *, msg_id: str, headers: dict[str, str] | None = None
    ) -> None: ...


@dataclass
class _Waiter:
    token: str
    future: asyncio.Future[Outcome] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def settle(self, outcome: Outcome) -> None:
        if not self.future.done():
            self.future.set_result(outcome)


class WorkQueue:
    """One process's end of the queue `name`; several tasks may `take` at once."""

    def __init__(self, bus: QueueBus, name: str, ack_wait_s: float, closed: Callable[[WorkQueue], None]) -> None:
        self.bus, self.name, self.ack_wait_s, self._closed = bus, name, ack_wait_s, closed
        self._waiters: dict[str, _Waiter] = {}  # oldest first
        self._inbox = ""
        self._subscription: Any = None
        self._count = 0
        self._open = False

    async def open(self) -> None:
        self._inbox = self.bus.client.new_inbox()
        self._subscription = await self.bus.client.subscribe(
            f"{self._inbox}.*", cb=self._arrived, pending_msgs_limit=0, pending_bytes_limit=0
        )
        self._open = True

    async def close(self) -> None:
        """Take no more; items in hand stay valid."""
        if not self._open:
            return
        self._open = False
        self._closed(self)
        for waiter in list(self._waiters.values()):
            waiter.settle("broken")
        if not self.bus.client.is_closed:
            await self._subscription.unsubscribe()

    def poke(self) -> None:
        """The connection is a new one: the open requests are lost, make new ones."""
        for waiter in list(self._waiters.values()):
            waiter.settle("again")

    async def take(self, timeout_s: float) -> WorkItem | None:
        """The next item; None if there is none within `timeout_s`. Raises WorkQueueGone once the queue is deleted."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            message = await self._next(deadline)
            if message is None:
                return None
            delivery = delivery_of(message.reply)
            assert delivery is not None  # only messages of a consumer get here
            seen = stored(delivery.sequence, delivery.time, message.subject, message.headers, message.data)
            if seen.event is not None:
                return WorkItem(self, message, seen, seen.event, delivery.deliveries)
            await self.bus.publish_dead_letter(
                seen, f"undecodable: {seen.undecodable}", msg_id=f"undecodable.{seen.sequence}"
            )
            await message.term()

    async def _next(self, deadline: float) -> Msg | None:
        loop = asyncio.get_running_loop()
        first = True
        while first or loop.time() < deadline:
            first = False
            if not self._open:
                raise WorkQueueGone(f"work queue {self.name} is closed")
            outcome = await self._pull(min(max(deadline - loop.time(), 0.01), SLICE_S))
            if isinstance(outcome, Msg):
                return outcome
            if outcome == "broken":
                if await self.bus.queue_state(self.name) is None:
                    await self.close()
                    raise WorkQueueGone(f"work queue {self.name} was deleted")
                await asyncio.sleep(0.05)
        return None

    async def _pull(self, expires_s: float) -> Outcome:
        """One pull request for one message, to its end."""
        self._count += 1
        waiter = _Waiter(str(self._count))
        self._waiters[waiter.token] = waiter
        timer = asyncio.get_running_loop().call_later(expires_s + GRACE_S, waiter.settle, "expired")
        try:
            if self.bus.client.is_connected:  # else the reconnect asks for it
                await self.bus.client.publish(
                    f"$JS.API.CONSUMER.MSG.NEXT.{self.bus.stream}.{self.name}",
                    request_body(1, expires_s),
                    reply=f"{self._inbox}.{waiter.token}",
                )
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and isinstance(waiter.future.result(), Msg):
                await _give_back(waiter.future.result())
            raise
        finally:
            timer.cancel()
            self._waiters.pop(waiter.token, None)

    async def _arrived(self, message: Msg) -> None:
        if delivery_of(message.reply) is None:
            waiter = self._waiters.get(message.subject.rsplit(".", 1)[1])
            if waiter is not None:
                waiter.settle("expired" if status_of(message) in ("404", "408") else "broken")
            return
        for waiter in self._waiters.values():
            if not waiter.future.done():
                waiter.settle(message)
                return
        await _give_back(message)  # its taker was cancelled meanwhile


async def _give_back(message: Msg) -> None:
    with contextlib.suppress(nats.errors.Error):
        await message.nak()


@dataclass(frozen=True)
class WorkItem:
    """One delivered item: `event`, its message in the stream, and how often it was delivered (1 = the first time)."""

    queue: WorkQueue
    message: Msg
    stored: Stored
    event: Event
    deliveries: int

    @property
    def sequence(self) -> int:
        return self.stored.sequence

    @property
    def headers(self) -> dict[str, str]:
        return self.stored.headers

    async def ack(self) -> None:
        """Done: its result is durable. Returns when the server has noted it, or cannot any more (see `_moot`)."""
        await self._settle(b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back, to be delivered again after `delay_s`."""
        await self._settle(b'-NAK {"delay": %d}' % int(delay_s * 1e9) if delay_s else b"-NAK")

    async def dead_letter(self, reason: str) -> None:
        """Nobody can do this item: report it and never deliver it again."""
        await self.queue.bus.publish_dead_letter(self.stored, reason, msg_id=f"{self.queue.name}.{self.sequence}.dead")
        await self._settle(b"+TERM")

    @contextlib.asynccontextmanager
    async def heartbeat(self) -> AsyncIterator[None]:
        """Keeps the item ours while the body runs."""
        beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.queue.ack_wait_s / 3)
            with contextlib.suppress(nats.errors.Error):  # the server is away: the next beat may reach it
                await self.message.in_progress()

    async def _settle(self, verdict: bytes) -> None:
        """Send `verdict` until the server confirms it, or there is nothing left to confirm."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + max(self.queue.ack_wait_s, 3 * ACK_TRY_S)  # then it is delivered again anyway
        bus = self.queue.bus

        async def attempt() -> None:
            try:
                await bus.client.request(self.message.reply, verdict, timeout=ACK_TRY_S)
            except (nats.errors.NoRespondersError, nats.errors.TimeoutError):
                moot = await self._moot()
                if not moot and loop.time() < give_up_at:
                    raise
                text = verdict.decode()
                log.warning("%s of item %d: %s", text, self.sequence, moot or "never confirmed, it may come again")

        await bus.until_done(f"settle item {self.sequence} of {self.queue.name}", attempt)

    async def _moot(self) -> str:
        """Why the server will never confirm anything about this delivery; "" if it may yet.

        A server that is killed before it wrote down a delivery does not know of it afterwards: it does not answer, and
        delivers the item again."""
        state = await self.queue.bus.queue_state(self.queue.name)
        if state is None:
            return "the queue is gone"
        if state.delivered < self.sequence:
            return "the server lost track of this delivery, the item comes again"
        return ""
