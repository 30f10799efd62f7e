"""Reading a JetStream consumer by pull requests, in order, whatever happens to the connection.

Owns the one place where consumer sequence numbers are looked at. Invariant of `follow`: the stream sequences that
come out rise strictly, and none that matches the filter is left out: a gap, a silence, a lost consumer or a reconnect
makes a new consumer that starts after the last sequence that was given out.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

BATCH = 256
BATCH_BYTES = 32 * 1024 * 1024
EXPIRES_S = 30.0
HEARTBEAT_S = 2.0
SILENCE_S = 5.0  # two heartbeats and a margin

ENDED_REQUEST = ("404", "408")
HEARTBEAT_STATUS = "100"


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a JetStream reply subject says about its message."""

    consumer: str
    deliveries: int
    sequence: int
    consumer_sequence: int
    time: float  # seconds since the epoch at which the stream stored the message
    pending: int  # matching messages behind this one, when it was delivered


def delivery_of(reply: str) -> Delivery | None:
    """Parse ``$JS.ACK.<stream>.<consumer>.<deliveries>.<seq>.<consumer seq>.<ns>.<pending>`` (or the longer form with
    domain and account in front); None for anything else, such as a status message."""
    if not reply.startswith("$JS.ACK."):
        return None
    part = reply.split(".")
    at = 3 if len(part) == 9 else 5
    return Delivery(
        part[at],
        int(part[at + 1]),
        int(part[at + 2]),
        int(part[at + 3]),
        int(part[at + 4]) / 1e9,
        int(part[at + 5]),
    )


def status_of(message: Msg) -> str:
    return str((message.headers or {}).get("Status", ""))


def request_body(batch: int, expires_s: float, heartbeat_s: float = 0.0, max_bytes: int = 0) -> bytes:
    body: dict[str, int] = {"batch": batch, "expires": int(expires_s * 1e9)}
    if heartbeat_s:
        body["idle_heartbeat"] = int(heartbeat_s * 1e9)
    if max_bytes:
        body["max_bytes"] = max_bytes
    return json.dumps(body).encode()


class Inbox:
    """Where the answers of one consumer's pull requests arrive; `next` gives them out in order of arrival."""

    def __init__(self) -> None:
        self.subject = ""
        self._queue: deque[Msg] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._poked = False
        self._subscription: Any = None

    async def open(self, client: Client) -> None:
        self.subject = client.new_inbox()
        # No limits here: a pull request bounds what can arrive.
        self._subscription = await client.subscribe(
            self.subject, cb=self._arrived, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def poke(self) -> None:
        """Make `next` return None once the queue is empty: the connection is a new one."""
        self._poked = True
        self._wake()

    async def _arrived(self, message: Msg) -> None:
        self._queue.append(message)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, timeout_s: float) -> Msg | None:
        """The next message; None after `timeout_s` of silence, or when poked."""
        if self._queue:
            return self._queue.popleft()
        if self._poked:
            return None
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        return self._queue.popleft() if self._queue else None


@dataclass(frozen=True)
class Source:
    """What `follow` needs of its bus."""

    client: Client
    stream: str
    create: Callable[[str, int], Awaitable[int]]  # (consumer name, first sequence) -> messages pending; until it works
    drop: Callable[[str], Awaitable[None]]  # best effort
    inboxes: set[Inbox]  # poked by the bus at each reconnect


async def follow(
    source: Source, start: int, *, stop_when_drained: bool = False
) -> AsyncGenerator[tuple[Delivery, Msg], None]:
    """Messages from stream sequence `start` on. With `stop_when_drained` it ends when no matching one is left."""
    cursor = start
    while True:
        inbox, name = Inbox(), f"r{uuid.uuid4().hex}"
        source.inboxes.add(inbox)
        try:
            await inbox.open(source.client)
            if await source.create(name, cursor) == 0 and stop_when_drained:
                return
            async for delivery, message in _one_consumer(source, inbox, name):
                if delivery.sequence >= cursor:
                    cursor = delivery.sequence + 1
                    yield delivery, message
                if delivery.pending == 0 and stop_when_drained:
                    return
        finally:
            source.inboxes.discard(inbox)
            await source.drop(name)
            if not source.client.is_closed:
                await inbox.close()


async def _one_consumer(source: Source, inbox: Inbox, name: str) -> AsyncGenerator[tuple[Delivery, Msg], None]:
    """Messages of consumer `name` until something about it is wrong (then the caller makes another one)."""
    expected, open_request = 1, 0
    subject = f"$JS.API.CONSUMER.MSG.NEXT.{source.stream}.{name}"
    body = request_body(BATCH, EXPIRES_S, HEARTBEAT_S, BATCH_BYTES)
    while True:
        if open_request == 0:
            await source.client.publish(subject, body, reply=inbox.subject)
            open_request = BATCH
        message = await inbox.next(SILENCE_S)
        if message is None:
            return
        delivery = delivery_of(message.reply)
        if delivery is None:
            status = status_of(message)
            if status == HEARTBEAT_STATUS:
                continue
            if status in ENDED_REQUEST or (status == "409" and _is_full(message)):
                open_request = 0
                continue
            return
        if delivery.consumer_sequence != expected:
            return
        expected, open_request = expected + 1, open_request - 1
        yield delivery, message


def _is_full(message: Msg) -> bool:
    """409 is also how the server says that a request reached its byte limit: nothing is wrong then."""
    description = (message.headers or {}).get("Description", "")
    return "MaxBytes" in description or "Batch Completed" in description
