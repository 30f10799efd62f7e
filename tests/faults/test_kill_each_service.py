"""kill -9 of every service in turn, in the middle of its work: the run ends, and the books balance."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared import events as ev
from tests.faults.live_run import LiveRun, books_balance, live_run


@pytest.mark.e2e
@pytest.mark.timeout(600)
async def test_each_service_is_killed_once(tmp_path: Path) -> None:
    async with live_run(tmp_path) as run:
        await run.until(lambda e: isinstance(e, ev.RunPhaseChanged) and e.phase == "training")
        run.note_family()
        for service, moment in (
            ("proxy", ev.ModelCallRecorded),
            ("harness", ev.ExecutionStarted),
            ("evaluator", ev.ExecutionFinished),
            ("scheduler", ev.ExecutionAssessed),
            ("trajectory", ev.ModelCallRecorded),
        ):
            await run.until(lambda e, moment=moment: isinstance(e, moment))
            run.kill("cli.main", "serve", service)
            await run.until(lambda e, service=service: isinstance(e, ev.ServiceDied) and e.service == service)
        run.note_family()
        summary = await run.end()
        died = [e for e in run.seen if isinstance(e, ev.ServiceDied)]
        assert all(e.will_restart for e in died)
    books_balance(summary, steps=3, batch=12, evaluated=8)


async def history(run: LiveRun) -> AsyncIterator[ev.Event]:
    """The rest of the stream, from the files of the finished run."""
    from cli.history import open_stream

    async with open_stream(run.folder) as bus:
        async for stored in bus.read_until(await bus.last_sequence(), len(run.seen) + 1):
            if stored.event is not None:
                yield stored.event
