"""Parts that several tests of the kernel use: a run's first event, and a small real service."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from shared.actor import Effect, Publish, Wake
from shared.bus import Bus
from shared.config import ModelConfig, RunConfig, TasksConfig, to_plain
from shared.events import BurstEnded, Event, RefitOrdered, RunStarted, ServiceDied, TimerFired
from shared.runtime import ServiceContext, drive, serve_main
from shared.service import open_context
from shared.stored import Stored


def started(run: str, run_dir: Path) -> RunStarted:
    config = RunConfig(name="test", model=ModelConfig(path="model"), tasks=TasksConfig(train="tasks"))
    return RunStarted(
        run=run, config=to_plain(config), run_dir=str(run_dir), train_tasks=(), eval_tasks={}, started_at=0.0
    )


async def new_run(url: str, run: str, run_dir: Path) -> Bus:
    """A stream with its RunStarted; returns the control's bus."""
    bus = await Bus.connect(url, run, "control")
    await bus.create_stream()
    await bus.publish(started(run, run_dir), msg_id="started")
    return bus


async def context(url: str, run: str, service: str = "scheduler") -> ServiceContext:
    return await open_context(service, url, run)


def input_event(number: int) -> ServiceDied:
    """What CountingCore answers to."""
    return ServiceDied(service=f"in{number}", exit_code=number, will_restart=False, log_tail="")


class Counts(msgspec.Struct):
    inputs: int = 0
    total: int = 0
    fired: int = 0


class CountingCore:
    """Answers each input with two orders that depend on all inputs before; every third one sets a short timer, whose
    firing is answered with one more event."""

    def __init__(self) -> None:
        self.counts = Counts()

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        counts = self.counts
        match event:
            case ServiceDied(exit_code=number):
                counts.inputs += 1
                counts.total += number
                effects: list[Effect] = [
                    Publish(RefitOrdered(cell=counts.inputs, version=counts.total)),
                    Publish(RefitOrdered(cell=counts.inputs, version=-counts.total)),
                ]
                return [*effects, Wake(now + 0.02, f"t{counts.inputs}")] if counts.inputs % 3 == 0 else effects
            case TimerFired(key=key):
                counts.fired += 1
                return [Publish(BurstEnded(burst=int(key[1:]), version=0))]
        return []

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self.counts)

    def restore(self, data: bytes) -> None:
        self.counts = msgspec.msgpack.decode(data, type=Counts)


def expected_orders(inputs: int) -> list[tuple[int, int]]:
    """(cell, version) of the orders that CountingCore gives for inputs 1..n, in order."""
    total, orders = 0, []
    for number in range(1, inputs + 1):
        total += number
        orders += [(number, total), (number, -total)]
    return orders


def die_at(name: str, occurrence: int) -> Callable[[str, Stored | None], None]:
    """A step hook that kills this very process (SIGKILL) at the n-th step of that name."""
    left = occurrence

    def step(here: str, _message: Stored | None) -> None:
        nonlocal left
        if here == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return step


def run_counting_service(url: str, run: str, death: tuple[str, int], snapshot_every: int) -> None:
    """Body of a real service process that dies at `death` (never, if that step does not come)."""

    async def serve(ctx: ServiceContext) -> None:
        await drive(ctx, CountingCore(), snapshot_every=snapshot_every, step=die_at(*death))

    raise SystemExit(asyncio.run(serve_main("scheduler", url, run, serve)))


async def history(bus: Bus) -> list[Stored]:
    return [message async for message in bus.read_until(await bus.last_sequence())]
