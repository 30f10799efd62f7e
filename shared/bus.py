"""JetStream as Gyre uses it: one stream per run, published to durably, read in order, claimed from by work queues.

Invariants: `publish` returns only when the server holds the event, and whatever is tried again to get there carries
the same message id, so the event is stored once. `read` gives every sequence once, in order, across reconnects and
restarts of the server. Everything here waits for a server that is away; only what waiting cannot cure is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import nats
import nats.errors
from nats.aio.client import Client
from nats.js import api
from nats.js import errors as js_errors

from shared import ids
from shared.codec import encode, event_name
from shared.events import DeadLetter, Event
from shared.nats_server import MAX_EVENT_BYTES, MAX_PAYLOAD
from shared.pull import Inbox, Source, follow
from shared.stored import Stored, stored
from shared.workqueue import QueueState, WorkItem, WorkQueue, WorkQueueGone

__all__ = [
    "MAX_EVENT_BYTES",
    "Bus",
    "BusClosed",
    "BusRefused",
    "EventTooLarge",
    "Stored",
    "WorkItem",
    "WorkQueue",
    "WorkQueueGone",
]

log = logging.getLogger("gyre.bus")
T = TypeVar("T")

MESSAGE_ID = "Nats-Msg-Id"
DUPLICATE_WINDOW_S = 24 * 3600.0
STREAM_EXISTS_OTHERWISE = 10058  # JetStream: the name is in use with a different configuration
REQUEST_S = 5.0
RETRY_FIRST_S, RETRY_MOST_S = 0.05, 1.0
COMPLAIN_EVERY_S = 10.0

RETRIED = (
    TimeoutError,
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.StaleConnectionError,
    js_errors.NoStreamResponseError,
    js_errors.ServiceUnavailableError,
    js_errors.ServerError,
    js_errors.NotFoundError,
)


class BusRefused(RuntimeError):
    """The server or its URL is wrong in a way that waiting does not cure."""


class BusClosed(RuntimeError):
    """The connection was closed for good."""


class EventTooLarge(ValueError):
    """The event does not fit into one message."""


async def uncancelled(action: Awaitable[T]) -> T:
    """Await `action`; a cancellation that arrives while it ends is not lost.

    nats-py waits with asyncio.wait_for, which in Python 3.11 returns the result and forgets the cancellation then."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    result = await action
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


class Bus:
    """One connection to one run's stream, for one service. Made by `connect`."""

    def __init__(self, url: str, run: str, service: str) -> None:
        self.url, self.run, self.service = url, ids.check(run), ids.check(service)
        self.stream = ids.stream_name(run)
        self.client = Client()
        self.js = self.client.jetstream(timeout=REQUEST_S)
        self.inject: Callable[[dict[str, str]], None] | None = None  # puts the trace context into headers
        self._inboxes: set[Inbox] = set()
        self._queues: set[WorkQueue] = set()
        self._connected = asyncio.Event()
        self._closer: asyncio.Task[object] | None = None

    # ------------------------------------------------------------------------------------------------- connection

    @classmethod
    async def connect(cls, url: str, run: str, service: str) -> Bus:
        """Connect, waiting for the server as long as it takes; BusRefused if URL or credentials are wrong."""
        bus = cls(url, run, service)
        refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        connecting = asyncio.create_task(bus._connect(refused))
        try:
            await asyncio.wait({connecting, refused}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not connecting.done():
                connecting.cancel()
        if refused.done():
            refused.result()
        refused.cancel()
        await connecting
        return bus

    async def _connect(self, refused: asyncio.Future[None]) -> None:
        quiet_until = 0.0

        async def on_error(error: Exception) -> None:
            nonlocal quiet_until
            if self._closed_elsewhere:
                raise asyncio.CancelledError
            if "authorization" in str(error).lower() and not refused.done():
                refused.set_exception(
                    BusRefused(
                        f"{self.url} refuses us ({error}): put valid credentials into bus.url (nats://user:pw@...)"
                    )
                )
            if time.monotonic() >= quiet_until:
                quiet_until = time.monotonic() + COMPLAIN_EVERY_S
                log.warning("bus %s: %s", self.url, error or type(error).__name__)

        async def on_up() -> None:
            if self._closed_elsewhere:
                await self.client.close()  # it had connected again when it was told to end
            self._connected.set()
            self._poke()

        async def on_down() -> None:
            self._connected.clear()

        try:
            await self.client.connect(
                self.url,
                name=f"{self.service}@{self.run}",
                error_cb=on_error,
                reconnected_cb=on_up,
                disconnected_cb=on_down,
                closed_cb=on_up,  # for good: whoever waits shall notice
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.25,
                connect_timeout=2,
                ping_interval=5,
                max_outstanding_pings=2,
                pending_size=4 * MAX_PAYLOAD,
            )
        except (ValueError, TypeError, nats.errors.Error) as error:  # what waiting cures does not get here
            raise BusRefused(f"bus.url {self.url!r} is no NATS address ({error}): use nats://host:port") from error
        await on_up()

    async def close(self) -> None:
        """Close the connection; what waits on this bus ends with BusClosed."""
        self._closer = self._closer or asyncio.current_task()
        await self.client.close()
        self._connected.set()
        self._poke()

    @property
    def _closed_elsewhere(self) -> bool:
        """True in nats-py's task that reconnects, after `close`: its cancellation is forgotten where it meets a connect
        that ends at that moment (as in `uncancelled`), and if nobody ended it, it would go on for ever."""
        return self._closer not in (None, asyncio.current_task())

    def _poke(self) -> None:
        for inbox in list(self._inboxes):
            inbox.poke()
        for queue in list(self._queues):
            queue.poke()

    async def until_done(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try `attempt` again and again until it works; raise what waiting cannot cure."""
        pause, complain_at = RETRY_FIRST_S, time.monotonic() + COMPLAIN_EVERY_S
        while True:
            await self._connected.wait()
            try:
                return await uncancelled(attempt())
            except RETRIED as error:
                reason = str(error) or type(error).__name__
            except nats.errors.ConnectionClosedError as error:
                raise BusClosed(f"{what}: the connection to {self.url} is closed") from error
            if time.monotonic() >= complain_at:
                complain_at = time.monotonic() + COMPLAIN_EVERY_S
                log.warning("%s: still trying (%s)", what, reason)
            await asyncio.sleep(pause)
            pause = min(pause * 2, RETRY_MOST_S)

    # ----------------------------------------------------------------------------------------------------- stream

    async def create_stream(self, *, duplicate_window_s: float = DUPLICATE_WINDOW_S) -> None:
        """Make the run's stream; one that is there stays as it is."""
        config = api.StreamConfig(
            name=self.stream,
            subjects=[f"gyre.{self.run}.>"],
            storage=api.StorageType.FILE,
            retention=api.RetentionPolicy.LIMITS,
            discard=api.DiscardPolicy.NEW,
            duplicate_window=duplicate_window_s,
        )
        try:
            await self.until_done("create the stream", lambda: self.js.add_stream(config))
        except js_errors.BadRequestError as error:
            if error.err_code != STREAM_EXISTS_OTHERWISE:
                raise

    async def last_sequence(self) -> int:
        """Sequence of the newest message; 0 if there is none."""
        info = await self.until_done("ask for the stream's state", lambda: self.js.stream_info(self.stream))
        return int(info.state.last_seq)

    # ---------------------------------------------------------------------------------------------------- publish

    async def publish(self, event: Event, *, msg_id: str | None = None, headers: dict[str, str] | None = None) -> int:
        """Store `event`; returns its sequence (that of the first copy, if `msg_id` was stored before)."""
        subject = ids.subject(self.run, self.service, event.entity(), event_name(event))
        return await self.publish_bytes(subject, encode(event), msg_id=msg_id, headers=headers)

    async def publish_bytes(
        self, subject: str, data: bytes, *, msg_id: str | None = None, headers: dict[str, str] | None = None
    ) -> int:
        """As `publish`, for an event that is encoded already."""
        if len(data) > MAX_EVENT_BYTES:
            raise EventTooLarge(
                f"{subject}: {len(data)} bytes, at most {MAX_EVENT_BYTES} fit: put the payload into the blob store "
                "and its BlobRef into the event"
            )
        sent = {**(headers or {}), MESSAGE_ID: msg_id or uuid.uuid4().hex}
        if self.inject is not None and "traceparent" not in sent:
            self.inject(sent)
        ack = await self.until_done(f"publish {subject}", lambda: self.js.publish(subject, data, headers=sent))
        return int(ack.seq)

    async def publish_dead_letter(
        self, message: Stored, reason: str, *, msg_id: str, headers: dict[str, str] | None = None
    ) -> None:
        """Report a message that could not be decoded or handled; `msg_id` makes the report a single one."""
        data = message.data
        if len(data) > MAX_EVENT_BYTES // 2:
            data, reason = b"", f"{reason} (data left out: {len(message.data)} bytes, whole in the stream)"
        letter = DeadLetter(
            service=self.service, subject=message.subject, sequence=message.sequence, reason=reason, data=data
        )
        log.error("dead letter: sequence %d on %s: %s", message.sequence, message.subject, reason)
        await self.publish(letter, msg_id=msg_id, headers=headers)

    # ------------------------------------------------------------------------------------------------------- read

    async def read(self, start: int = 1, *, subject: str | None = None) -> AsyncGenerator[Stored, None]:
        """Everything from sequence `start` on that matches `subject`, in order, without end."""
        async with contextlib.aclosing(follow(self._source(subject), start)) as messages:
            async for delivery, message in messages:
                yield stored(delivery.sequence, delivery.time, message.subject, message.headers, message.data)

    async def read_until(self, end: int, start: int = 1, subject: str | None = None) -> AsyncGenerator[Stored, None]:
        """As `read`, but only sequences start..end; waits if the stream is shorter than `end` yet."""
        while await self.last_sequence() < end:
            await asyncio.sleep(RETRY_FIRST_S)
        source = self._source(subject)
        async with contextlib.aclosing(follow(source, start, stop_when_drained=True)) as messages:
            async for delivery, message in messages:
                if delivery.sequence > end:
                    return
                yield stored(delivery.sequence, delivery.time, message.subject, message.headers, message.data)
                if delivery.sequence == end:
                    return

    def _source(self, subject: str | None) -> Source:
        async def create(name: str, start: int) -> int:
            config = api.ConsumerConfig(
                name=name,
                deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=max(start, 1),
                ack_policy=api.AckPolicy.NONE,
                filter_subject=subject,
                mem_storage=True,
                inactive_threshold=60.0,
            )
            info = await self.until_done("open a reader", lambda: self.js.add_consumer(self.stream, config))
            return int(info.num_pending or 0)

        async def drop(name: str) -> None:
            if self.client.is_connected:
                await self.client.publish(f"$JS.API.CONSUMER.DELETE.{self.stream}.{name}", b"")

        return Source(self.client, self.stream, create, drop, self._inboxes)

    # ----------------------------------------------------------------------------------------------------- queues

    async def work_queue(
        self, name: str, subject: str, *, ack_wait_s: float = 30.0, max_in_flight: int = 1000
    ) -> WorkQueue:
        """The shared queue `name` over the stream's messages that match `subject`; made if it is not there.

        An item that is neither acknowledged nor heartbeated for `ack_wait_s` goes to another taker."""
        config = api.ConsumerConfig(
            name=ids.check(name),
            durable_name=name,
            deliver_policy=api.DeliverPolicy.ALL,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            max_deliver=-1,
            max_ack_pending=max_in_flight,
            filter_subject=subject,
        )
        await self.until_done(f"open work queue {name}", lambda: self.js.add_consumer(self.stream, config))
        queue = WorkQueue(self, name, ack_wait_s, self._queues.discard)
        await queue.open()
        self._queues.add(queue)
        return queue

    async def delete_work_queue(self, name: str) -> None:
        """Remove the queue for everybody; takers get WorkQueueGone. Fine if it is not there."""

        async def attempt() -> None:
            with contextlib.suppress(js_errors.NotFoundError):
                await self.js.delete_consumer(self.stream, name)

        await self.until_done(f"delete work queue {name}", attempt)
        for queue in [q for q in self._queues if q.name == name]:
            await queue.close()

    async def queue_state(self, name: str) -> QueueState | None:
        """What the server knows of the queue; None if there is no such queue."""

        async def attempt() -> QueueState | None:
            try:
                info = await self.js.consumer_info(self.stream, name)
            except js_errors.NotFoundError:
                return None
            return QueueState(int(info.delivered.stream_seq) if info.delivered else 0)

        return await self.until_done(f"ask for work queue {name}", attempt)

    async def queue_exists(self, name: str) -> bool:
        return await self.queue_state(name) is not None
