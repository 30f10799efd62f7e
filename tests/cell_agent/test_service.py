"""The real agents of two cells (SGLang, Megatron, Mooncake, NATS) with a scripted scheduler and hand-made micro-steps:
start, train a batch in both cells and one with a loss, return, lose a trainer and an engine, export, stop."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from services.cell_agent import service
from shared import events as ev
from shared import microstep
from shared.bus import Bus, Stored
from shared.config import CellsConfig, to_plain
from shared.events import Event
from shared.service import open_context
from tests.cell_agent.trainer.forest import random_step, run_config, write_model

pytestmark = [pytest.mark.engine, pytest.mark.megatron, pytest.mark.timeout(420)]
CELLS = 2


@dataclass
class ScriptedRun:
    """Everything around the agents: publishes as scheduler and trajectory, and waits for what the agents say."""

    buses: dict[str, Bus]
    seen: list[Event] = field(default_factory=list)
    grew: asyncio.Event = field(default_factory=asyncio.Event)
    order: int = 0

    async def publish(self, by: str, event: Event) -> None:
        await self.buses[by].publish(event)

    async def follow(self) -> None:
        async for message in self.buses["control"].read(1):
            assert isinstance(message, Stored)
            if message.event is not None:
                self.seen.append(message.event)
                self.grew.set()

    async def until(self, wanted: Callable[[Event], bool], since: int = 0, timeout_s: float = 150.0) -> Event:
        """The first event from index `since` on that is wanted."""
        async with asyncio.timeout(timeout_s):
            at = since
            while True:
                while at < len(self.seen):
                    if wanted(self.seen[at]):
                        return self.seen[at]
                    at += 1
                self.grew.clear()
                await self.grew.wait()

    async def order_role(self, cell: int, role: str, version: int) -> None:
        self.order += 1
        event = ev.CellRoleOrdered(cell=cell, order=self.order, role=role, burst=1, version=version, reason="script")
        await self.publish("scheduler", event)

    async def publish_micro_steps(self, batch: int, count: int) -> list[str]:
        names = [f"b{batch:05d}m{i:04d}" for i in range(count)]
        rng = np.random.default_rng(batch)
        for name in names:
            ready = ev.MicroStepReady(
                micro_step=name,
                batch=batch,
                groups=("g",),
                tokens=1,
                path_tokens=1,
                trained_tokens=1,
                payload=microstep.encode(random_step(name, rng)),
                blob=None,
            )
            await self.publish("trajectory", ready)
        return names

    def of(self, kind: type[Event]) -> list:
        return [event for event in self.seen if isinstance(event, kind)]


def is_role(cell: int, role: str) -> Callable[[Event], bool]:
    return lambda e: isinstance(e, ev.CellRoleChanged) and (e.cell, e.role) == (cell, role)


def is_kind(kind: type[Event], **values: object) -> Callable[[Event], bool]:
    return lambda e: isinstance(e, kind) and all(getattr(e, k) == v for k, v in values.items())


@asynccontextmanager
async def agents(nats_url: str, run: str, run_dir: Path) -> AsyncIterator[ScriptedRun]:
    names = ("control", "scheduler", "trajectory")
    script = ScriptedRun({name: await Bus.connect(nats_url, run, name) for name in names})
    await script.buses["control"].create_stream()
    model = write_model(run_dir / "model")
    config = run_config(model, CellsConfig(count=CELLS, capacity=4, engine_tokens=8192), learning_rate=1e-3)
    started = ev.RunStarted(
        run=run, config=to_plain(config), run_dir=str(run_dir), train_tasks=(), eval_tasks={}, started_at=time.time()
    )
    await script.publish("control", started)
    stop = asyncio.Event()
    contexts = [await open_context("cell_agent", nats_url, run, {"cell": str(k)}, stop) for k in range(CELLS)]
    serving = [asyncio.create_task(service.serve(ctx)) for ctx in contexts]
    following = asyncio.create_task(script.follow())
    try:
        yield script
    finally:
        stop.set()
        outcome = await asyncio.gather(*serving, return_exceptions=True)
        following.cancel()
        for bus in [*script.buses.values(), *(ctx.bus for ctx in contexts)]:
            await bus.close()
    assert outcome == [None] * CELLS


async def test_two_cells_through_a_burst_and_three_losses(nats_url, fresh_run, tmp_path):
    async with agents(nats_url, fresh_run, tmp_path) as run:
        await both_come_up(run)
        await both_train_a_batch(run)
        await a_satellite_dies_in_the_next_batch(run)
        await a_lost_trainer_comes_back(run)
        await a_lost_engine_comes_back(run)
        await the_policy_is_exported(run, tmp_path)
        assert len(children()) == 2 * CELLS
    assert not children(), "the agents left processes behind"


async def both_come_up(run: ScriptedRun) -> None:
    for cell in range(CELLS):
        await run.until(is_role(cell, "rollout"))
    assert run.of(ev.CellTrainerReady)[0].version == 0
    assert [w.version for w in run.of(ev.WeightsPublished)] == [0]


async def both_train_a_batch(run: ScriptedRun) -> None:
    for cell in range(CELLS):
        await run.order_role(cell, "training", 0)
    await run.until(is_role(0, "training"))
    await open_batch(run, 1)
    names = await run.publish_micro_steps(1, 6)
    for name in names:
        await run.until(is_kind(ev.MicroStepTrained, micro_step=name))
    cells = tuple(sorted({e.cell for e in run.of(ev.MicroStepTrained)} | {0}))
    committed = await reduced(run, 1, cells, names)
    assert sorted(e.micro_step for e in run.of(ev.MicroStepTrained)) == names
    assert [w.version for w in run.of(ev.WeightsPublished)] == [0, 1]
    assert run.seen.index(run.of(ev.WeightsPublished)[1]) < run.seen.index(committed)


async def a_satellite_dies_in_the_next_batch(run: ScriptedRun) -> None:
    """What it trained is trained again by the core, and the batch is committed without it."""
    since = len(run.seen)
    await open_batch(run, 2)
    names = await run.publish_micro_steps(2, 12)
    await run.until(is_kind(ev.MicroStepTrained, batch=2, cell=1), since)
    kill_one("services.cell_agent.trainer.worker", "--cell 1")
    failed = await run.until(is_kind(ev.CellFailed, cell=1), since)
    assert isinstance(failed, ev.CellFailed)
    assert failed.part == "trainer"
    for name in names:
        await run.until(is_kind(ev.MicroStepTrained, cell=0, micro_step=name), since)
    await reduced(run, 2, (0,), names)
    await run.until(is_role(1, "rollout"), since)
    await run.order_role(0, "rollout", 2)
    await run.until(is_role(0, "rollout"), since)
    ready = await run.until(is_kind(ev.CellEngineReady, cell=1), since)
    assert isinstance(ready, ev.CellEngineReady)
    await run.publish("scheduler", ev.RefitOrdered(cell=1, version=2))
    if ready.version < 2:
        await run.until(is_kind(ev.CellRefitted, cell=1, version=2), since)
    for url in {e.url for e in run.of(ev.CellEngineReady)}:
        assert await version_of(url) == "2"


async def open_batch(run: ScriptedRun, batch: int) -> None:
    opened = ev.BatchOpened(batch=batch, attempt=1, base_version=batch - 1, groups=1, burst=1)
    await run.publish("scheduler", opened)
    for cell in range(CELLS):
        await run.until(is_kind(ev.CellJoinedBatch, cell=cell, batch=batch))


async def reduced(run: ScriptedRun, batch: int, cells: tuple[int, ...], names: list[str]) -> ev.BatchCommitted:
    """Seal the batch and have `cells` reduce it; the commit is checked and its claims are acknowledged."""
    seal = ev.BatchSealed(
        batch=batch, groups=("g",), executions=8, micro_steps=tuple(names), mean_reward=0.5, mean_staleness=0.0
    )
    await run.publish("trajectory", seal)
    await run.publish("scheduler", ev.BatchReduceOrdered(batch=batch, attempt=1, cells=cells, executions=8))
    committed = await run.until(is_kind(ev.BatchCommitted, batch=batch))
    assert isinstance(committed, ev.BatchCommitted)
    assert committed.version == batch
    assert sorted(committed.micro_steps) == names
    assert Path(committed.checkpoint).is_dir()
    await everything_is_acknowledged(run, batch)
    return committed


async def everything_is_acknowledged(run: ScriptedRun, batch: int) -> None:
    bus = run.buses["control"]
    async with asyncio.timeout(10):
        while True:
            info = await bus.js.consumer_info(bus.stream, f"micro-{batch}-1")
            if (info.num_ack_pending, info.num_pending) == (0, 0):
                return
            await asyncio.sleep(0.1)


async def version_of(url: str) -> str:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    async with aiohttp.ClientSession() as http, http.post(url + "/generate", json=body) as response:
        return (await response.json())["meta_info"]["weight_version"]


async def a_lost_trainer_comes_back(run: ScriptedRun) -> None:
    """The core's trainer is killed: a new incarnation loads the checkpoint, its healthy engine stays."""
    since, engine = len(run.seen), run.of(ev.CellEngineReady)[0]
    kill_one("services.cell_agent.trainer.worker", "--cell 0")
    failed = await run.until(is_kind(ev.CellFailed, cell=0), since)
    assert isinstance(failed, ev.CellFailed)
    assert failed.part == "trainer"
    ready = await run.until(is_kind(ev.CellTrainerReady, cell=0), since)
    assert isinstance(ready, ev.CellTrainerReady)
    assert ready.version == 2
    assert ready.incarnation != failed.incarnation
    again = await run.until(is_kind(ev.CellEngineReady, cell=0), since)
    assert isinstance(again, ev.CellEngineReady)
    assert again.url in {e.url for e in run.of(ev.CellEngineReady)[:CELLS]}
    assert again.version == 2
    assert engine.capacity == again.capacity
    await run.until(is_role(0, "rollout"), since)


async def a_lost_engine_comes_back(run: ScriptedRun) -> None:
    """The satellite's engine is killed: the new one is refitted with weights of the live core before it serves."""
    since = len(run.seen)
    kill_one("services.cell_agent.engine.launch", json.dumps(1), tail="engine-1")
    failed = await run.until(is_kind(ev.CellFailed, cell=1), since)
    assert isinstance(failed, ev.CellFailed)
    assert failed.part == "engine"
    again = await run.until(is_kind(ev.CellEngineReady, cell=1), since)
    assert isinstance(again, ev.CellEngineReady)
    assert again.version == 2
    assert await version_of(again.url) == "2"
    await run.until(is_role(1, "rollout"), since)


async def the_policy_is_exported(run: ScriptedRun, run_dir: Path) -> None:
    await run.publish("scheduler", ev.RunPhaseChanged(phase="eval_after"))
    exported = await run.until(is_kind(ev.PolicyExported))
    assert isinstance(exported, ev.PolicyExported)
    assert exported.version == 2
    assert {"config.json", "model.safetensors"} <= {p.name for p in Path(exported.path).iterdir()}
    assert Path(exported.path) == run_dir / "policy"


def children() -> set[int]:
    """Live engine and trainer processes below this one."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and b"services.cell_agent" in command_of(entry):
            status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if status[0] != "Z" and int(status[1]) == os.getpid():
                found.add(int(entry.name))
    return found


def command_of(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def kill_one(module: str, argument: str, tail: str = "") -> None:
    """kill -9 of the child that runs `module` with `argument` (or whose log is `tail`)."""
    for pid in children():
        command = command_of(Path(f"/proc/{pid}")).decode()
        log = Path(f"/proc/{pid}/fd/1").readlink().name
        if module in command and (tail in log if tail else argument in command):
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"no {module} {argument} runs")
