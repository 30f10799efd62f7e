import asyncio
from pathlib import Path
from random import Random

import pytest

from services.trajectory.core import BadSnapshot, TrajectoryCore
from services.trajectory.service import Externalised, serve
from shared import microstep
from shared.actor import Publish
from shared.blobs import BlobStore
from shared.bus import Bus
from shared.events import BatchSealed, Event, GroupAssigned, GroupReady, MicroStepReady
from shared.player import differences, replay
from shared.service import open_context
from tests.trajectory.worlds import assessed, dispatched, finished, opened, random_stream, record, run_started, started

OURS = (GroupReady, GroupAssigned, MicroStepReady, BatchSealed)


def _two_executions() -> list[Event]:
    events: list[Event] = [run_started(n=2, budget=8), opened(1, 1)]
    for index, score in ((0, 0.0), (1, 1.0)):
        first = dispatched(0, index)
        call = record("c", execution=first.execution, inputs=(1, 2), outputs=range(3, 9))
        events += [first, started(first.execution), call, finished(first.execution), assessed(first.execution, score)]
    return events


def test_only_payloads_above_the_threshold_leave_the_event(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    plain, outside = TrajectoryCore(), Externalised(TrajectoryCore(), blobs, 100)
    inside = Externalised(TrajectoryCore(), blobs, 10_000)
    for number, event in enumerate(_two_executions()):
        expected = list(plain.handle(event, number))
        assert list(inside.handle(event, number)) == expected
        given = list(outside.handle(event, number))
        assert [type(e) for e in given] == [type(e) for e in expected]
    (step,) = [e.event for e in given if isinstance(e, Publish) and isinstance(e.event, MicroStepReady)]
    assert step.payload is None
    assert not blobs.has(step.blob)
    outside.store()
    (want,) = [e.event.payload for e in expected if isinstance(e, Publish) and isinstance(e.event, MicroStepReady)]
    assert blobs.get(step.blob) == want
    assert microstep.decode(want).micro_step == "b00001m0000"


def test_a_failing_store_keeps_the_payload_for_the_next_try(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    outside = Externalised(TrajectoryCore(), BlobStore(root), 100)
    for number, event in enumerate(_two_executions()):
        given = list(outside.handle(event, number))
    root.write_text("a file where the store's folder should be")
    with pytest.raises(OSError):
        outside.store()
    root.unlink()
    outside.store()
    refs = [e.event.blob for e in given if isinstance(e, Publish) and isinstance(e.event, MicroStepReady)]
    assert all(BlobStore(root).get(ref) for ref in refs)


def test_damaged_snapshots_are_refused_by_name() -> None:
    with pytest.raises(BadSnapshot):
        TrajectoryCore.restore(b"\x93\x01")


async def test_the_service_publishes_each_effect_once_across_restarts(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    """The service is cancelled and started again while events keep coming; the stream must equal an unbroken run."""
    rng = Random(5)
    events = random_stream(rng, groups=6, n=3, batches=2, per_batch=3, budget=40)
    events[0] = run_started(run=fresh_run, run_dir=str(tmp_path), n=3, budget=40, blob_threshold=150)
    control = await Bus.connect(nats_url, fresh_run, "control")
    await control.create_stream()
    for part in range(5):
        cut = slice(part * len(events) // 5, (part + 1) * len(events) // 5)
        for event in events[cut]:
            await control.publish(event)
        await _serve_for(nats_url, fresh_run, 0.2)
    await _serve_until_quiet(nats_url, fresh_run, control)
    end = await control.last_sequence()
    messages = [message async for message in control.read_until(end)]
    core = Externalised(TrajectoryCore(), BlobStore(tmp_path / "blobs"), 150)
    effects = replay(messages, core, "trajectory")
    assert differences(messages, effects, "trajectory") == []
    published = [m.event for m in messages if isinstance(m.event, OURS)]
    assert len(published) == len([e for e in effects if isinstance(e.effect, Publish)])
    assert len([e for e in published if isinstance(e, BatchSealed)]) == 2
    blobs = [e.blob for e in published if isinstance(e, MicroStepReady) and e.blob is not None]
    assert blobs
    assert all(BlobStore(tmp_path / "blobs").get(ref) for ref in blobs)
    await control.close()


async def _serve_for(nats_url: str, run: str, seconds: float) -> None:
    """Cancelled, not stopped: the nearest thing to a kill inside one process."""
    ctx = await open_context("trajectory", nats_url, run)
    task = asyncio.create_task(serve(ctx))
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    ctx.telemetry.shutdown()
    await ctx.bus.close()


async def _serve_until_quiet(nats_url: str, run: str, control: Bus) -> None:
    ctx = await open_context("trajectory", nats_url, run)
    task = asyncio.create_task(serve(ctx))
    last, quiet = -1, 0
    while quiet < 5:
        await asyncio.sleep(0.2)
        now = await control.last_sequence()
        quiet = quiet + 1 if now == last else 0
        last = now
    ctx.stop.set()
    await task
    ctx.telemetry.shutdown()
    await ctx.bus.close()
