"""Claims on a real queue, with a scripted trainer that answers after a moment."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.cell_agent import claims as claims_module
from services.cell_agent.claims import Claims, forget_queues, queue_name
from services.cell_agent.trainer import protocol
from shared import microstep
from shared.blobs import BlobStore
from shared.bus import Bus
from shared.events import MicroStepReady, MicroStepTrained

BATCH, ATTEMPT = 1, 1


class ScriptedTrainer:
    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.trained: list[str] = []
        self.drains = 0

    async def call(self, message: protocol.Command) -> protocol.Reply:
        if isinstance(message, protocol.EndBatch):
            self.drains += 1
            return protocol.Done(id=0)
        assert isinstance(message, protocol.Train)
        name = microstep.decode(message.payload).micro_step
        self.trained.append(name)
        await asyncio.sleep(self.seconds)
        return protocol.Trained(id=0, micro_step=name, tokens=1, seconds=self.seconds)


class Place:
    """A stream with micro-steps of one batch, and claims of several cells on it."""

    def __init__(self, agent: Bus, trajectory: Bus, blobs: BlobStore) -> None:
        self.agent, self.trajectory, self.blobs = agent, trajectory, blobs
        self.running: list[asyncio.Task[None]] = []

    async def publish(self, count: int, big: bool = False) -> list[str]:
        names = [f"m{i}" for i in range(count)]
        for name in names:
            step = microstep.MicroStep(name, BATCH, b"", (), (), b"", b"", b"")
            payload = microstep.encode(step)
            await self.trajectory.publish(
                MicroStepReady(
                    micro_step=name,
                    batch=BATCH,
                    groups=("g",),
                    tokens=1,
                    path_tokens=1,
                    trained_tokens=1,
                    payload=None if big else payload,
                    blob=self.blobs.put(payload) if big else None,
                )
            )
        return names

    def claim(self, cell: int, trainer: ScriptedTrainer, elsewhere: set[str] | None = None, depth: int = 1) -> Claims:
        claims = Claims(
            bus=self.agent,
            blobs=self.blobs,
            cell=cell,
            incarnation=f"c{cell}",
            batch=BATCH,
            attempt=ATTEMPT,
            depth=depth,
            sealed=True,
            call=trainer.call,
            elsewhere=(elsewhere or set()).__contains__,
        )
        self.running.append(asyncio.create_task(claims.run()))
        return claims

    async def reported(self) -> list[tuple[str, int]]:
        end = await self.agent.last_sequence()
        events = [m.event async for m in self.agent.read_until(end)]
        return [(e.micro_step, e.cell) for e in events if isinstance(e, MicroStepTrained)]

    async def unsettled(self) -> tuple[int, int]:
        info = await self.agent.js.consumer_info(self.agent.stream, queue_name(BATCH, ATTEMPT))
        return info.num_ack_pending or 0, info.num_pending or 0


@pytest.fixture
async def place(nats_url, fresh_run, tmp_path):
    async with opened(nats_url, fresh_run, tmp_path) as made:
        yield made


@asynccontextmanager
async def opened(nats_url: str, run: str, folder) -> AsyncIterator[Place]:
    agent = await Bus.connect(nats_url, run, "cell_agent")
    trajectory = await Bus.connect(nats_url, run, "trajectory")
    await agent.create_stream()
    made = Place(agent, trajectory, BlobStore(folder))
    yield made
    for task in made.running:
        task.cancel()
    await asyncio.gather(*made.running, return_exceptions=True)
    await agent.close()
    await trajectory.close()


async def until(condition, timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not (condition() if not asyncio.iscoroutinefunction(condition) else await condition()):
            await asyncio.sleep(0.02)


async def test_two_cells_share_a_batch_and_each_step_is_trained_once(place):
    names = await place.publish(30, big=True)
    one, two = ScriptedTrainer(), ScriptedTrainer()
    both = [place.claim(0, one), place.claim(1, two)]
    await until(lambda: len(one.trained) + len(two.trained) == 30)
    for claims in both:
        await claims.stop()
    assert sorted(one.trained + two.trained) == sorted(names)
    assert min(len(one.trained), len(two.trained)) > 0
    assert sorted(await place.reported()) == sorted([(m, 0) for m in one.trained] + [(m, 1) for m in two.trained])
    assert await place.unsettled() == (30, 0), "nothing is acknowledged before the commit"
    for claims in both:
        await claims.settle(tuple(names))
    assert await place.unsettled() == (0, 0)


async def test_what_is_given_back_goes_to_others_at_once_and_is_not_reported(place):
    names = await place.publish(3)
    slow, quick = ScriptedTrainer(seconds=0.5), ScriptedTrainer()
    first = place.claim(0, slow, depth=3)
    await until(lambda: len(slow.trained) == 3)
    await first.give_back()
    second = place.claim(1, quick)
    await until(lambda: len(quick.trained) == 3)
    await second.stop()
    assert sorted(await place.reported()) == [(m, 1) for m in names]


async def test_claims_of_a_failed_cell_come_back_at_once(place):
    names = await place.publish(2)
    failed, heir = ScriptedTrainer(seconds=60.0), ScriptedTrainer()
    first = place.claim(0, failed, depth=2)
    await until(lambda: len(failed.trained) == 2)
    await first.drop()
    second = place.claim(1, heir)
    await until(lambda: len(heir.trained) == 2, timeout_s=5.0)
    await second.stop()
    assert sorted(await place.reported()) == [(m, 1) for m in names]


async def test_claims_of_a_dead_cell_come_back(place, monkeypatch):
    monkeypatch.setattr(claims_module, "ACK_WAIT_S", 0.6)
    monkeypatch.setattr(claims_module, "GIVE_BACK_S", 0.0)
    names = await place.publish(2)
    dead, heir = ScriptedTrainer(), ScriptedTrainer()
    first = place.claim(0, dead, depth=2)
    await until(lambda: len(dead.trained) == 2)
    await first.drop()  # as far as the server can tell, it died
    second = place.claim(1, heir)
    await until(lambda: len(heir.trained) == 2)
    await second.stop()
    assert sorted(heir.trained) == names


async def test_a_held_claim_outlives_the_ack_wait(place, monkeypatch):
    monkeypatch.setattr(claims_module, "ACK_WAIT_S", 0.6)
    await place.publish(2)
    holder, idle = ScriptedTrainer(), ScriptedTrainer()
    place.claim(0, holder, depth=2)
    await until(lambda: len(holder.trained) == 2)
    place.claim(1, idle)
    await asyncio.sleep(2.0)
    assert idle.trained == []
    assert len(holder.trained) == 2


async def test_a_step_that_another_live_cell_trained_is_left_alone(place):
    await place.publish(3)
    trainer = ScriptedTrainer()
    claims = place.claim(0, trainer, elsewhere={"m1"})
    await until(lambda: len(trainer.trained) == 2)
    await asyncio.sleep(0.3)
    await claims.stop()
    assert sorted(trainer.trained) == ["m0", "m2"]
    assert claims.held == {"m0", "m2"}


async def test_a_sealed_batch_drains_the_pipeline(place):
    """With stages, the trainer answers only after a successor or a drain: the loop must not wait for it for ever."""
    await place.publish(1)
    trainer = ScriptedTrainer(seconds=0.8)
    place.claim(0, trainer, depth=3)
    await until(lambda: trainer.drains > 0)


async def test_queues_of_settled_batches_are_deleted(place):
    await place.publish(1)
    trainer = ScriptedTrainer()
    claims = place.claim(0, trainer)
    await until(lambda: trainer.trained)
    await claims.stop()
    await claims.settle(("m0",))
    await forget_queues(place.agent, BATCH)
    assert not await place.agent.queue_exists(queue_name(BATCH, ATTEMPT))
    await forget_queues(place.agent, 0)
