"""The runtime on a real nats-server: a core's effects live and in replay, timers, failing events, real processes killed
(SIGKILL) at every step of handling an event."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared import ids
from shared.actor import Core, Do, Effect, Publish
from shared.bus import Bus
from shared.events import BurstEnded, DeadLetter, Event, RefitOrdered, ServiceDied, StopRequested, TimerFired
from shared.player import differences, replay
from shared.runtime import ServiceContext, drive
from shared.stored import Stored
from tests.shared.support import (
    CountingCore,
    context,
    expected_orders,
    history,
    input_event,
    new_run,
    run_counting_service,
)


@asynccontextmanager
async def running(ctx: ServiceContext, core: Core, **options: object) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(drive(ctx, core, **options))  # type: ignore[arg-type]
    try:
        yield task
    finally:
        ctx.stop.set()
        await asyncio.wait_for(task, 5)
        await ctx.bus.close()


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not await condition():
            await asyncio.sleep(0.02)


def orders_in(messages: Sequence[Stored]) -> list[tuple[int, int]]:
    return [(m.event.cell, m.event.version) for m in messages if isinstance(m.event, RefitOrdered)]


def bursts_in(messages: Sequence[Stored]) -> list[int]:
    return [m.event.burst for m in messages if isinstance(m.event, BurstEnded)]


def settled(bus: Bus, inputs: int) -> Callable[[], Awaitable[bool]]:
    """Whether the stream holds at least everything that CountingCore owes for the inputs."""

    async def check() -> bool:
        messages = await history(bus)
        return len(orders_in(messages)) >= 2 * inputs and len(bursts_in(messages)) >= inputs // 3

    return check


# -------------------------------------------------------------------------------------------------------------- live


async def test_effects_are_published_with_their_cause_and_replay_is_byte_identical(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    await control.publish(input_event(1))  # before the service is there
    async with running(await context(nats_url, fresh_run), CountingCore()):
        for number in range(2, 8):
            await control.publish(input_event(number))
        await until(settled(control, 7))
    messages = await history(control)
    assert orders_in(messages) == expected_orders(7)
    first = next(m for m in messages if isinstance(m.event, RefitOrdered))
    assert (first.headers["Gyre-Actor"], first.headers["Gyre-Cause"]) == ("scheduler", "2.0")
    effects = replay(messages, CountingCore(), "scheduler")
    assert differences(messages, effects, "scheduler") == []
    assert [c.data for c in effects if isinstance(c.effect, Publish)] == [
        m.data for m in messages if m.headers.get("Gyre-Actor") == "scheduler" and not isinstance(m.event, TimerFired)
    ]
    await control.close()


async def test_a_different_core_is_noticed_in_replay(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    async with running(await context(nats_url, fresh_run), CountingCore()):
        await control.publish(input_event(1))
        await until(settled(control, 1))

    class Other(CountingCore):
        def handle(self, event: Event, now: float) -> Sequence[Effect]:
            return super().handle(event, now)[:1]

    messages = await history(control)
    assert "replay gives nothing" in differences(messages, replay(messages, Other(), "scheduler"), "scheduler")[0]
    await control.close()


async def test_do_is_performed_live_in_order_and_not_in_replay(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    class Doing(CountingCore):
        def handle(self, event: Event, now: float) -> Sequence[Effect]:
            match event:
                case ServiceDied(exit_code=number):
                    return [Do(number), Do(-number)]
            return []

    control = await new_run(nats_url, fresh_run, tmp_path)
    await control.publish(input_event(1))
    done: list[object] = []
    lived: list[int] = []
    seen: list[int] = []

    async def perform(command: object) -> None:
        done.append(command)

    async def on_live() -> None:
        lived.append(len(seen))

    ctx = await context(nats_url, fresh_run)
    options = {"perform": perform, "on_live": on_live, "observe": lambda m: seen.append(m.sequence)}
    async with running(ctx, Doing(), **options):
        await until(lambda: _true(bool(lived)))
        await control.publish(input_event(2))
        await control.publish(input_event(3))
        await until(lambda: _true(len(done) == 4))
    assert done == [2, -2, 3, -3]
    assert lived == [2]  # once, after the history
    assert seen == [1, 2, 3, 4]
    await control.close()


async def _true(value: bool) -> bool:
    return value


async def test_an_action_that_fails_ends_the_service_with_its_error(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    class Doing(CountingCore):
        def handle(self, event: Event, now: float) -> Sequence[Effect]:
            return [Do("break")] if isinstance(event, ServiceDied) else []

    async def perform(command: object) -> None:
        raise OSError(f"cannot {command}")

    control = await new_run(nats_url, fresh_run, tmp_path)
    ctx = await context(nats_url, fresh_run)
    task = asyncio.create_task(drive(ctx, Doing(), perform=perform))
    await asyncio.sleep(0.2)
    await control.publish(input_event(1))
    with pytest.raises(OSError, match="cannot break"):
        await asyncio.wait_for(task, 5)
    await ctx.bus.close()
    await control.close()


# ------------------------------------------------------------------------------------------------------------ timers


class TimedCore(CountingCore):
    """Input n: wake at now + n / 10 with the one key "k"; records when it was woken."""

    def __init__(self) -> None:
        super().__init__()
        self.due = 0.0
        self.woken: list[float] = []

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        from shared.actor import Wake

        match event:
            case ServiceDied(exit_code=number):
                self.due = now + number / 10
                return [Wake(self.due, "k")]
            case TimerFired():
                self.woken.append(now - self.due)
                return [Publish(BurstEnded(burst=len(self.woken), version=0))]
        return []


async def test_a_timer_fires_once_not_before_its_time_and_the_later_wake_replaces(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    core = TimedCore()
    async with running(await context(nats_url, fresh_run), core):
        await control.publish(input_event(1))
        await control.publish(input_event(4))
        await asyncio.sleep(0.25)
        assert core.woken == []  # the first was replaced
        await until(lambda: _true(bool(core.woken)))
        await asyncio.sleep(0.2)
    assert len(core.woken) == 1
    assert 0 <= core.woken[0] < 0.3
    await control.close()


async def test_a_timer_that_came_due_while_the_service_was_down_fires_at_its_return(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    await control.publish(input_event(1))
    async with running(await context(nats_url, fresh_run), TimedCore()):
        await asyncio.sleep(0.02)  # gone before it fires
    await asyncio.sleep(0.15)
    for _ in range(2):  # the second life finds it answered
        async with running(await context(nats_url, fresh_run), TimedCore()):
            await until(lambda: _burst(control))
            await asyncio.sleep(0.1)
    messages = await history(control)
    assert bursts_in(messages) == [1]
    assert sum(isinstance(m.event, TimerFired) for m in messages) == 1
    await control.close()


async def _burst(bus: Bus) -> bool:
    return bool(bursts_in(await history(bus)))


async def test_an_actor_is_not_woken_by_the_timer_of_another_of_its_service(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    from shared.service import open_context

    control = await new_run(nats_url, fresh_run, tmp_path)
    agents = [await open_context("cell_agent", nats_url, fresh_run, {"cell": str(k)}) for k in range(2)]
    cores = [TimedCore(), CountingCore()]  # only the first sets timers; the second would answer any
    async with running(agents[0], cores[0]), running(agents[1], cores[1]):
        await control.publish(input_event(1))
        await until(lambda: _burst(control))
        await asyncio.sleep(0.1)
    causes = [m.headers["Gyre-Actor"] for m in await history(control) if isinstance(m.event, BurstEnded)]
    assert causes == ["cell_agent-0"]
    await control.close()


# ----------------------------------------------------------------------------------------------------- failed events


class Fragile(CountingCore):
    """Raises on every multiple of 4, after it has changed its state and set timers aside."""

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        effects = super().handle(event, now)
        if isinstance(event, ServiceDied) and event.exit_code % 4 == 0:
            raise RuntimeError("no fours")
        return effects


class Skipping(CountingCore):
    """What Fragile must come to: multiples of 4 never happened."""

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        skipped = isinstance(event, ServiceDied) and event.exit_code % 4 == 0
        return [] if skipped else super().handle(event, now)


async def test_an_event_that_fails_is_dead_lettered_changes_nothing_and_stops_nothing(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    for number in range(1, 6):
        await control.publish(input_event(number))
    for life in range(2):  # history in the second
        core = Fragile()
        async with running(await context(nats_url, fresh_run), core):
            for number in range(6 + 4 * life, 10 + 4 * life):
                await control.publish(input_event(number))
            served = [n for n in range(1, 10 + 4 * life) if n % 4]
            await until(lambda due=2 * len(served): _orders(control, due))
            await until(lambda due=len(served) // 3: _bursts(control, due))
    messages = await history(control)
    letters = [m.event for m in messages if isinstance(m.event, DeadLetter)]
    assert sorted(letter.reason for letter in letters) == ["RuntimeError: no fours"] * 3  # 4, 8, 12: once each
    clean = replay(messages, Skipping(), "scheduler")
    assert differences(messages, clean, "scheduler") == []
    assert differences(messages, replay(messages, Fragile(), "scheduler"), "scheduler") == []
    assert orders_in(messages) == [
        (c.effect.event.cell, c.effect.event.version)
        for c in clean
        if isinstance(c.effect, Publish) and isinstance(c.effect.event, RefitOrdered)
    ]
    await control.close()


async def _orders(bus: Bus, due: int) -> bool:
    return len(orders_in(await history(bus))) >= due


async def _bursts(bus: Bus, due: int) -> bool:
    return len(bursts_in(await history(bus))) >= due


async def test_an_event_that_nobody_could_publish_counts_as_failed(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    class Wrong(CountingCore):
        def handle(self, event: Event, now: float) -> Sequence[Effect]:
            match event:
                case ServiceDied(exit_code=1):
                    return [Publish(StopRequested(reason=5))]  # type: ignore[arg-type]
                case ServiceDied(exit_code=2):
                    return [Publish(input_event(3)), "no effect"]  # type: ignore[list-item]
                case ServiceDied(exit_code=4):
                    return [Publish(ServiceDied(service="a b", exit_code=0, will_restart=False, log_tail=""))]
            return super().handle(event, now)

    control = await new_run(nats_url, fresh_run, tmp_path)
    async with running(await context(nats_url, fresh_run), Wrong()):
        for number in (1, 2, 4, 5):
            await control.publish(input_event(number))
        await until(lambda: _orders(control, 2))
    letters = [m.event for m in await history(control) if isinstance(m.event, DeadLetter)]
    assert ["wrong type" in letters[0].reason, "no Publish" in letters[1].reason, "id" in letters[2].reason] == [
        True
    ] * 3
    assert len(letters) == 3
    await control.close()


async def test_an_undecodable_event_is_dead_lettered_once_for_all_services(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    async with (
        running(await context(nats_url, fresh_run), CountingCore()),
        running(await context(nats_url, fresh_run, "trajectory"), CountingCore()),
    ):
        await control.publish_bytes(ids.subject(fresh_run, "control", "run", "unknown"), b"\x81\xa5event\xa3new")
        await control.publish(input_event(1))
        await until(lambda: _orders(control, 4))
    letters = [m.event for m in await history(control) if isinstance(m.event, DeadLetter)]
    assert [(letter.sequence, letter.data) for letter in letters] == [(2, b"\x81\xa5event\xa3new")]
    await control.close()


# ------------------------------------------------------------------------------------------- processes killed (SIGKILL)

STEPS = (
    "read",
    "before publish 0",
    "after publish 0",
    "before publish 1",
    "after publish 1",
    "done",
    "before snapshot",
    "after snapshot",
)
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.shared.support"])


async def killed_at(url: str, run: str, death: tuple[str, int], snapshot_every: int) -> int | None:
    """Start a real service process and wait until it has died there (or, at most, 3 s); returns its exit code."""
    process = processes.Process(target=run_counting_service, args=(url, run, death, snapshot_every))
    process.start()
    await asyncio.to_thread(process.join, 3.0)
    code = process.exitcode
    process.kill()
    process.join()
    return code


@pytest.mark.parametrize("snapshot_every", [0, 3])
async def test_a_process_killed_between_any_two_steps_neither_loses_nor_doubles_an_effect(
    nats_url: str, fresh_run: str, tmp_path: Path, snapshot_every: int
) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    number, deaths = 0, 0
    steps = STEPS if snapshot_every else STEPS[:-2]
    for turn, step in enumerate(steps * 2):
        dying = asyncio.create_task(killed_at(nats_url, fresh_run, (step, 1 + turn % 3), snapshot_every))
        while not dying.done():  # inputs come before, while and after it is alive
            number += 1
            await control.publish(input_event(number))
            await asyncio.sleep(0.02)
        deaths += dying.result() == -9
    assert deaths == 2 * len(steps)
    # A kill while a start publishes what the last life left open.
    for turn in range(2):
        number += 1
        await control.publish(input_event(number))
        assert await killed_at(nats_url, fresh_run, (("before", "after")[turn] + " missing", 1), snapshot_every) == -9
    async with running(await context(nats_url, fresh_run), CountingCore(), snapshot_every=snapshot_every):
        await until(settled(control, number))
        await asyncio.sleep(0.1)
    messages = await history(control)
    assert sorted(orders_in(messages)) == sorted(expected_orders(number))
    assert orders_in(messages) == expected_orders(number)
    assert sorted(bursts_in(messages)) == list(range(3, number + 1, 3))
    assert sum(isinstance(m.event, TimerFired) for m in messages) == number // 3
    assert differences(messages, replay(messages, CountingCore(), "scheduler"), "scheduler") == []
    assert (tmp_path / "snapshots" / "scheduler.snapshot").exists() == bool(snapshot_every)
    await control.close()


async def test_a_restart_long_after_the_duplicate_window_doubles_nothing(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    control = await Bus.connect(nats_url, fresh_run, "control")
    await control.create_stream(duplicate_window_s=0.1)
    await new_run(nats_url, fresh_run, tmp_path)
    for number in range(1, 7):
        await control.publish(input_event(number))
    for _ in range(3):
        async with running(await context(nats_url, fresh_run), CountingCore()):
            await until(settled(control, 6))
        await asyncio.sleep(0.2)
    messages = await history(control)
    assert orders_in(messages) == expected_orders(6)
    assert bursts_in(messages) == [3, 6]
    await control.close()


async def test_two_processes_of_one_actor_at_once_publish_each_effect_once(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    first, second = await context(nats_url, fresh_run), await context(nats_url, fresh_run)
    async with running(first, CountingCore()), running(second, CountingCore()):
        for number in range(1, 10):
            await control.publish(input_event(number))
        await until(settled(control, 9))
        await asyncio.sleep(0.2)
    messages = await history(control)
    assert sorted(orders_in(messages)) == sorted(expected_orders(9))
    assert sorted(bursts_in(messages)) == [3, 6, 9]
    await control.close()


async def test_a_damaged_snapshot_is_not_used(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    for life in range(2):
        async with running(await context(nats_url, fresh_run), CountingCore(), snapshot_every=2):
            for number in range(1 + 4 * life, 5 + 4 * life):
                await control.publish(input_event(number))
            await until(settled(control, 4 + 4 * life))
            await until(lambda: _true((tmp_path / "snapshots" / "scheduler.snapshot").exists()))
        snapshot = tmp_path / "snapshots" / "scheduler.snapshot"
        snapshot.write_bytes(snapshot.read_bytes()[:-1] + b"\x00")
    assert orders_in(await history(control)) == expected_orders(8)
    await control.close()


async def test_an_event_that_begins_a_trace_does_not_continue_that_of_its_cause(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    ctx = await context(nats_url, fresh_run)

    def begins(event: Event) -> str:
        return "order" if isinstance(event, RefitOrdered) and event.cell == 1 else ""

    async with running(ctx, CountingCore(), begins=begins):
        for number in (1, 2):
            headers = {"traceparent": f"00-{number:032x}-{1:016x}-01"}
            await control.publish(input_event(number), headers=headers)
        await until(settled(control, 2))
    traces = [
        (m.event.cell, m.headers["traceparent"]) for m in await history(control) if isinstance(m.event, RefitOrdered)
    ]
    begun = {trace for cell, trace in traces if cell == 1}
    assert begun
    for cell, trace in traces:
        continues = trace.split("-")[1] in (f"{1:032x}", f"{2:032x}")
        assert continues == (cell != 1)
    assert len(begun) == sum(cell == 1 for cell, _ in traces), "each is a trace of its own"
    await control.close()
