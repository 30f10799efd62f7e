"""The bus against a real nats-server: order, single storage, work queues, dead letters, a server killed in mid-flow."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shared import ids
from shared.bus import Bus, BusClosed, BusRefused, EventTooLarge, WorkQueueGone
from shared.events import DeadLetter, StopRequested
from shared.nats_server import NatsServer, NatsServerFailed, find_server, start_server
from tests.shared.support import history


def note(text: object) -> StopRequested:
    return StopRequested(reason=str(text))


async def connected(url: str, run: str, service: str = "control") -> Bus:
    bus = await Bus.connect(url, run, service)
    await bus.create_stream()
    return bus


async def test_what_is_published_is_read_in_order_with_sequence_time_and_headers(nats_url: str, fresh_run: str) -> None:
    bus = await connected(nats_url, fresh_run)
    for i in range(600):  # more than two pull requests
        assert await bus.publish(note(i), headers={"X-Number": str(i)}) == i + 1
    seen = await history(bus)
    assert [m.event for m in seen] == [note(i) for i in range(600)]
    assert [m.sequence for m in seen] == list(range(1, 601))
    assert [m.headers["X-Number"] for m in seen] == [str(i) for i in range(600)]
    assert all(a.time <= b.time for a, b in itertools.pairwise(seen))
    assert seen[0].subject == f"gyre.{fresh_run}.control.run.stop_requested"
    await bus.close()


async def test_one_message_id_is_stored_once_and_returns_the_first_sequence(nats_url: str, fresh_run: str) -> None:
    bus = await connected(nats_url, fresh_run)
    sequences = [await bus.publish(note("same"), msg_id="one") for _ in range(3)]
    assert sequences == [1, 1, 1]
    assert await bus.last_sequence() == 1
    await bus.close()


async def test_a_reader_from_the_middle_follows_what_comes_later(nats_url: str, fresh_run: str) -> None:
    bus = await connected(nats_url, fresh_run)
    for i in range(1, 6):
        await bus.publish(note(i))

    async def read_three() -> list[int]:
        found = []
        async for message in bus.read(4):
            found.append(message.sequence)
            if len(found) == 3:
                break
        return found

    reading = asyncio.create_task(read_three())
    await asyncio.sleep(0.1)
    await bus.publish(note(6))
    assert await asyncio.wait_for(reading, 5) == [4, 5, 6]
    await bus.close()


async def test_history_of_one_subject_ends_although_the_last_messages_are_others(nats_url: str, fresh_run: str) -> None:
    bus = await connected(nats_url, fresh_run)
    other = await Bus.connect(nats_url, fresh_run, "proxy")
    await bus.publish(note("a"))
    await other.publish(note("not mine"))
    await bus.publish(note("b"))
    await other.publish(note("not mine"))
    mine = ids.subject_filter(fresh_run, "control")
    assert [m.sequence async for m in bus.read_until(4, subject=mine)] == [1, 3]
    nothing = ids.subject_filter(fresh_run, "evaluator")
    assert [m async for m in bus.read_until(4, subject=nothing)] == []
    await bus.close()
    await other.close()


async def test_large_events_pass_and_too_large_ones_are_refused_with_the_fix(nats_url: str, fresh_run: str) -> None:
    bus = await connected(nats_url, fresh_run)
    for _ in range(6):  # 42 MB: more than one pull request may bring
        await bus.publish(note("x" * 7_000_000))
    assert [m.sequence async for m in bus.read_until(6)] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(EventTooLarge, match="blob store"):
        await bus.publish(note("x" * 9_000_000))
    await bus.close()


async def test_a_wrong_address_is_refused_at_once() -> None:
    with pytest.raises(BusRefused, match="nats://host:port"):
        await asyncio.wait_for(Bus.connect("nats://[oops", "r", "control"), 5)


async def test_wrong_credentials_are_refused_at_once(tmp_path: Path) -> None:
    server = start_server(tmp_path, with_parent=False)
    server.stop()
    with (tmp_path / "nats.conf").open("a") as conf:
        conf.write("\nauthorization { user: gyre, password: secret }\n")
    guarded = NatsServerWithConfiguration(tmp_path, server)
    try:
        with pytest.raises(BusRefused, match="credentials"):
            await asyncio.wait_for(Bus.connect(server.url, "r", "control"), 10)
        bus = await asyncio.wait_for(Bus.connect(f"nats://gyre:secret@127.0.0.1:{server.port}", "r", "control"), 10)
        await bus.close()
    finally:
        guarded.process.kill()
        guarded.process.wait()


class NatsServerWithConfiguration:
    """A server with the configuration file that lies in its store already, on the port that `before` had."""

    def __init__(self, store: Path, before: NatsServer) -> None:
        conf = store / "nats.conf"
        conf.write_text(conf.read_text().replace(":-1", f":{before.port}"))
        self.process = subprocess.Popen([str(find_server()), "-c", str(conf)], stderr=subprocess.DEVNULL)


async def test_a_closed_bus_ends_what_waits_on_it(nats_url: str, fresh_run: str) -> None:
    bus = await connected(nats_url, fresh_run)
    await bus.close()
    with pytest.raises(BusClosed):
        await bus.publish(note("late"))


@pytest.mark.parametrize("ends", ["refused", "connected"])
async def test_a_bus_that_is_closed_while_it_connects_again_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The attempt in flight ends with a result at the moment of its cancellation, which is forgotten then."""
    server = start_server(tmp_path)
    bus = await Bus.connect(server.url, "r", "a")
    connect, tries, others = asyncio.open_connection, asyncio.Event(), asyncio.all_tasks()
    connection: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def until_cancelled(*args: Any, **kwargs: Any) -> Any:
        tries.set()
        while not any(task.cancelling() for task in asyncio.all_tasks() - others):
            await asyncio.sleep(0)
        if ends == "refused":
            raise ConnectionRefusedError
        return connection.result()

    monkeypatch.setattr(asyncio, "open_connection", until_cancelled)
    server.kill()
    async with asyncio.timeout(10):
        await tries.wait()
        if ends == "connected":
            server = start_server(tmp_path, port=server.port)
            connection.set_result(await connect("127.0.0.1", server.port))
        await bus.close()
        while asyncio.all_tasks() - others:
            await asyncio.sleep(0.01)
    assert bus.client.is_closed
    server.kill()


def test_a_taken_port_is_reported_with_the_log(tmp_path: Path) -> None:
    first = start_server(tmp_path / "a", with_parent=False)
    try:
        with pytest.raises(NatsServerFailed, match="address already in use"):
            start_server(tmp_path / "b", first.port, with_parent=False)
    finally:
        first.kill()


# ------------------------------------------------------------------------------------------------------- work queues


async def test_each_item_has_one_taker_and_takers_share(nats_url: str, fresh_run: str) -> None:
    bus = await connected(nats_url, fresh_run)
    queues = [await bus.work_queue("w", ids.subject_filter(fresh_run)) for _ in range(2)]  # made twice: fine

    async def work(index: int) -> list[int]:
        taken = []
        while (item := await queues[index % 2].take(0.5)) is not None:
            taken.append(item.sequence)
            await item.ack()
        return taken

    working = [asyncio.create_task(work(i)) for i in range(4)]
    for i in range(60):
        await bus.publish(note(i))
    taken = await asyncio.gather(*working)
    assert sorted(itertools.chain(*taken)) == list(range(1, 61))
    await bus.close()


async def test_take_wakes_promptly_and_times_out_in_time(nats_url: str, fresh_run: str) -> None:
    bus = await connected(nats_url, fresh_run)
    queue = await bus.work_queue("w", ids.subject_filter(fresh_run))
    loop = asyncio.get_running_loop()
    before = loop.time()
    assert await queue.take(0.3) is None
    assert 0.25 < loop.time() - before < 1.5
    taking = asyncio.create_task(queue.take(20))
    await asyncio.sleep(0.2)
    before = loop.time()
    await bus.publish(note("now"))
    item = await taking
    assert item is not None
    assert item.event == note("now")
    assert loop.time() - before < 0.5
    await bus.close()


async def test_items_come_back_when_given_back_or_left_and_stay_with_a_heart_that_beats(
    nats_url: str, fresh_run: str
) -> None:
    bus = await connected(nats_url, fresh_run)
    queue = await bus.work_queue("w", ids.subject_filter(fresh_run), ack_wait_s=0.6)
    await bus.publish(note("work"))
    item = await queue.take(2)
    assert item is not None
    await item.nak()
    again = await queue.take(2)
    assert again is not None
    assert (again.sequence, again.deliveries) == (item.sequence, 2)
    async with again.heartbeat():
        assert await queue.take(1.5) is None  # two ack waits
    left = await queue.take(3)  # the heart stopped: it is left, and comes back
    assert left is not None
    assert left.deliveries == 3
    await left.ack()
    assert await queue.take(1.0) is None
    await bus.close()


async def test_a_dying_taker_loses_nothing(nats_url: str, fresh_run: str) -> None:
    bus = await connected(nats_url, fresh_run)
    dying = await Bus.connect(nats_url, fresh_run, "evaluator")
    for i in range(3):
        await bus.publish(note(i))
    queue = await dying.work_queue("w", ids.subject_filter(fresh_run), ack_wait_s=0.5)
    assert await queue.take(2) is not None
    waiting = asyncio.create_task(queue.take(5))
    await asyncio.sleep(0.1)
    await dying.client._close("CLOSED", False)  # the connection breaks off, nothing is said any more
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    other = await bus.work_queue("w", ids.subject_filter(fresh_run), ack_wait_s=0.5)
    found = set()
    while len(found) < 3:
        item = await other.take(5)
        assert item is not None
        found.add(item.sequence)
        await item.ack()
    await bus.close()


async def test_a_cancelled_take_gives_its_item_back_at_once(nats_url: str, fresh_run: str) -> None:
    bus = await connected(nats_url, fresh_run)
    queue = await bus.work_queue("w", ids.subject_filter(fresh_run), ack_wait_s=30)
    taking = asyncio.create_task(queue.take(10))
    await asyncio.sleep(0.1)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    await bus.publish(note("work"))  # meets the cancelled request
    item = await queue.take(5)
    assert item is not None
    await item.ack()
    await bus.close()


async def test_a_deleted_queue_tells_its_takers(nats_url: str, fresh_run: str) -> None:
    bus, other = await connected(nats_url, fresh_run), await connected(nats_url, fresh_run, "cell_agent")
    await bus.publish(note("work"))
    queue = await other.work_queue("w", ids.subject_filter(fresh_run))
    held = await queue.take(2)
    assert held is not None
    taking = asyncio.create_task(queue.take(30))
    await asyncio.sleep(0.1)
    await bus.delete_work_queue("w")
    await bus.delete_work_queue("w")  # fine
    with pytest.raises(WorkQueueGone):
        await asyncio.wait_for(taking, 5)
    await asyncio.wait_for(held.ack(), 5)  # nobody is there to note it: no error
    await bus.close()
    await other.close()


async def test_undecodable_and_hopeless_items_become_one_dead_letter_each(nats_url: str, fresh_run: str) -> None:
    bus = await connected(nats_url, fresh_run)
    subject = ids.subject(fresh_run, "control", "run", "stop_requested")
    await bus.publish_bytes(subject, b"\xc1 no MessagePack")
    await bus.publish(note("hopeless"))
    queue = await bus.work_queue("w", ids.subject_filter(fresh_run, event="stop_requested"))
    item = await queue.take(2)
    assert item is not None
    assert item.sequence == 2  # the first one was put aside
    await item.dead_letter("no such task")
    assert await queue.take(0.5) is None
    letters = [m.event for m in await history(bus) if isinstance(m.event, DeadLetter)]
    assert [(letter.sequence, letter.data[:1]) for letter in letters] == [(1, b"\xc1"), (2, b"\x82")]
    assert "no such task" in letters[1].reason
    await bus.close()


# ------------------------------------------------------------------------------------------------- the server killed


async def test_kill_minus_nine_of_the_server_in_mid_flow_loses_and_doubles_nothing(tmp_path: Path) -> None:
    server = start_server(tmp_path, with_parent=False)
    port, total = server.port, 400
    writer, reader, worker = [await Bus.connect(server.url, "r", s) for s in ("control", "proxy", "harness")]
    await writer.create_stream()
    queue = await worker.work_queue("w", ids.subject_filter("r"), ack_wait_s=2)
    read: list[int] = []
    worked: set[str] = set()

    async def write() -> None:
        for i in range(total):
            await writer.publish(note(i))
            await asyncio.sleep(0.002)

    async def follow() -> None:
        async for message in reader.read():
            assert isinstance(message.event, StopRequested)
            read.append(int(message.event.reason))
            if len(read) == total:
                return

    async def work() -> None:
        while len(worked) < total:
            item = await queue.take(3)
            if item is not None:
                assert isinstance(item.event, StopRequested)
                worked.add(item.event.reason)
                await item.ack()

    tasks = [asyncio.create_task(t()) for t in (write, follow, work)]
    try:
        for _ in range(2):
            await asyncio.sleep(0.25)
            server.kill()
            await asyncio.sleep(0.3)
            server = start_server(tmp_path, port, with_parent=False)
        await asyncio.wait_for(asyncio.gather(*tasks), 40)
        assert read == list(range(total))
        assert worked == {str(i) for i in range(total)}
        assert await writer.last_sequence() == total
    finally:
        for task in tasks:
            task.cancel()
        for bus in (writer, reader, worker):
            await bus.close()
        server.kill()


async def test_items_in_hand_when_the_server_is_killed_can_be_settled_and_none_is_lost(tmp_path: Path) -> None:
    """The server forgets deliveries that it had not written down: settling those must not wait for ever."""
    server = start_server(tmp_path, with_parent=False)
    bus = await Bus.connect(server.url, "r", "control")
    await bus.create_stream()
    queue = await bus.work_queue("w", ids.subject_filter("r"), ack_wait_s=60)
    for i in range(20):
        await bus.publish(note(i))
    items = [await queue.take(2) for _ in range(20)]
    server.kill()
    server = start_server(tmp_path, server.port, with_parent=False)
    try:
        settling = [item.ack() for item in items[:10] if item] + [item.nak() for item in items[10:] if item]
        await asyncio.wait_for(asyncio.gather(*settling), 15)
        again: set[int] = set()
        while len(again) < 10 and (item := await queue.take(4)) is not None:
            if item.sequence > 10:
                again.add(item.sequence)
            await item.ack()
        assert again == set(range(11, 21))  # those that were not acknowledged come again, all of them
        assert await queue.take(0.5) is None
    finally:
        await bus.close()
        server.kill()
