"""The scheduler service on a real nats-server: orders reach the stream once, also across a restart of the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from services.scheduler.core import SchedulerCore
from services.scheduler.service import Gauges, serve
from shared import events as ev
from shared.bus import Bus
from shared.player import differences, replay
from shared.service import open_context
from shared.stored import Stored
from shared.telemetry import Telemetry
from tests.scheduler.by_hand import Hand
from tests.scheduler.test_core import SMALL
from tests.scheduler.world import run_config, run_started


@asynccontextmanager
async def scheduler(url: str, run: str) -> AsyncIterator[None]:
    ctx = await open_context("scheduler", url, run)
    task = asyncio.create_task(serve(ctx))
    try:
        yield
    finally:
        ctx.stop.set()
        await asyncio.wait_for(task, 10)
        await ctx.bus.close()


async def history(bus: Bus) -> list[Stored]:
    return [message async for message in bus.read_until(await bus.last_sequence())]


async def wait_for(bus: Bus, kind: type[ev.Event], count: int) -> list[Stored]:
    async with asyncio.timeout(20):
        while True:
            messages = await history(bus)
            if sum(isinstance(m.event, kind) for m in messages) >= count:
                return messages
            await asyncio.sleep(0.02)


async def test_orders_are_published_once_across_restarts(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    control = await Bus.connect(nats_url, fresh_run, "control")
    await control.create_stream()
    started = msgspec.structs.replace(run_started(SMALL, run_config(SMALL)), run=fresh_run, run_dir=str(tmp_path))
    await control.publish(started, msg_id="started")
    async with scheduler(nats_url, fresh_run):
        for cell in range(SMALL.cells):
            life = f"i{cell}"
            await control.publish(ev.CellStarted(cell=cell, incarnation=life))
            await control.publish(ev.CellTrainerReady(cell=cell, incarnation=life, version=0))
            await control.publish(
                ev.CellEngineReady(cell=cell, incarnation=life, url="", version=0, capacity=SMALL.capacity)
            )
        await wait_for(control, ev.ExecutionPlaced, 10)
    death = ev.ServiceDied(service="cell-agent-2", exit_code=-9, will_restart=True, log_tail="")
    await control.publish(death)  # while the scheduler is away
    async with scheduler(nats_url, fresh_run):
        messages = await wait_for(control, ev.ExecutionMoved, 2)  # cell 0 has two places left
    placed = [m.event for m in messages if isinstance(m.event, ev.ExecutionPlaced)]
    assert len(placed) == len({e.execution for e in placed}) == 10
    assert differences(messages, replay(messages, SchedulerCore(), "scheduler"), "scheduler") == []
    await control.close()


def test_gauges_show_the_core_counters() -> None:
    telemetry = Telemetry.off()
    Gauges(telemetry).show(Hand(SMALL).all_up().core.state)
    assert telemetry.registry.get_sample_value("gyre_scheduler_waterlevel") == 10.0
    assert telemetry.registry.get_sample_value("gyre_scheduler_capacity") == 12.0
