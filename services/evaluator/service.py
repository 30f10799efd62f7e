"""Shell of the evaluator: takes finished executions from the work queue and scores what they left.

Invariant: ExecutionAssessed is published exactly once per execution (the stream is asked first, and the message id
makes a second one a duplicate), and the item is acknowledged only when it is durable.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from pathlib import Path

from services.evaluator.scoring import Examination, score
from services.evaluator.verdict import Ledger, Reward, Unresolved, assessed, try_again, without_artifact
from shared import ids, sandbox
from shared import workspace as workspaces
from shared.bounded_log import BoundedLog
from shared.bus import WorkItem
from shared.cancelling import end_all, in_thread
from shared.events import BlobRef, ExecutionAssessed, ExecutionFinished
from shared.following import Following
from shared.runtime import ServiceContext, drive
from shared.tasks import BrokenTask, Task, load

log = logging.getLogger("gyre.evaluator")

QUEUE = "evaluator"
WORK = "score-"  # + process id + execution: names of workspaces under <run dir>/work
TAKE_S = 20.0
ACK_WAIT_S = 30.0  # a killed process's items go to the next one after this long
BACKOFF_S = 0.5
MAX_IN_FLIGHT = 10_000
GIVE_UP_AFTER = 5  # deliveries that ended in an unexpected error


async def serve(ctx: ServiceContext) -> None:
    """Run until ctx.stop. Raises SandboxMissing."""
    scratch = ctx.run_dir / "work" / f"sandbox-{ctx.actor}-{os.getpid()}"
    await in_thread(_remove_leftovers, ctx.run_dir / "work")
    try:
        evaluator = Evaluator(ctx, await sandbox.find(scratch))
        stream = evaluator.stream
        async with asyncio.TaskGroup() as group:
            group.create_task(drive(ctx, evaluator.ledger, on_live=stream.go_live, observe=stream.observe))
            group.create_task(evaluator.work())
    finally:
        workspaces.remove(scratch)


class Evaluator:
    def __init__(self, ctx: ServiceContext, tools: sandbox.Bubblewrap) -> None:
        self.ctx, self.tools = ctx, tools
        self.ledger = Ledger()
        self.stream = Following()
        self._load = functools.lru_cache(maxsize=1024)(load)

    async def work(self) -> None:
        """Assess, `assessment.workers` at once, until ctx.stop."""
        stop = asyncio.create_task(self.ctx.stop.wait())
        workers = asyncio.create_task(self._work())
        try:
            await asyncio.wait({stop, workers}, return_when=asyncio.FIRST_COMPLETED)
            if workers.done():
                workers.result()
        finally:
            await end_all([stop, workers])

    async def _work(self) -> None:
        await self.stream.until(lambda: self.stream.live)
        finished = ids.subject_filter(self.ctx.run, service="harness", event="execution_finished")
        queue = await self.ctx.bus.work_queue(QUEUE, finished, ack_wait_s=ACK_WAIT_S, max_in_flight=MAX_IN_FLIGHT)

        async def worker() -> None:
            while not self.ctx.stop.is_set():
                item = await queue.take(TAKE_S)
                if item is not None:
                    await self._handle(item)

        async with asyncio.TaskGroup() as group:
            for _ in range(max(self.ctx.config.assessment.workers, 1)):
                group.create_task(worker())

    async def _handle(self, item: WorkItem) -> None:
        """One delivery, to its acknowledgement."""
        finished = item.event
        if not isinstance(finished, ExecutionFinished):
            await item.dead_letter(f"the evaluator queue takes ExecutionFinished, not {type(finished).__name__}")
            return
        try:
            async with item.heartbeat():
                if item.deliveries > 1:
                    await self.stream.caught_up(self.ctx.bus)
                if not self.ledger.needless(finished):
                    await self._publish(await self._assess(finished, item))
                await item.ack()
        except asyncio.CancelledError:
            await item.queue.close()  # or the server gives the item to a request of ours that nobody waits for any more
            await item.nak()
            raise
        except Exception as error:  # the edge of one item: the others go on, this one is tried again
            log.exception("%s, delivery %d", finished.execution, item.deliveries)
            if item.deliveries < GIVE_UP_AFTER:
                await item.nak(min(2.0**item.deliveries, 30.0))
                return
            detail = f"given up after {item.deliveries} deliveries: {type(error).__name__}: {error}"
            await self._publish(assessed(finished, "excluded", 0.0, item.deliveries, 0.0, detail))
            await item.ack()

    async def _publish(self, event: ExecutionAssessed) -> None:
        await self.ctx.bus.publish(event, msg_id=f"{event.execution}-assessed")

    async def _assess(self, finished: ExecutionFinished, item: WorkItem) -> ExecutionAssessed:
        """Score the artifact, trying again while that is unresolved."""
        started = time.monotonic()
        if finished.artifact is None:
            status, value, detail = without_artifact(finished)
            return assessed(finished, status, value, 0, 0.0, detail)
        dispatched_at = self.ledger.dispatched_at.get(finished.execution, item.stored.time)
        budget_until = dispatched_at + self.ctx.config.execution.overall_budget_s
        output = BoundedLog(
            self.ctx.run_dir / "logs" / "assessments" / f"{finished.execution}.log", f"attempt {finished.attempt}"
        )
        tries, outcome = 0, "not tried"
        try:
            while True:
                tries += 1
                result = await self._once(finished, finished.artifact, output)
                outcome = repr(result)
                seconds = time.monotonic() - started
                if isinstance(result, Reward):
                    return assessed(finished, "scored", result.score, tries, seconds, result.detail)
                log.warning("%s unresolved, try %d: %s", finished.execution, tries, result.reason)
                if not try_again(tries, self.ctx.config.assessment.tries, budget_until - time.time()):
                    return assessed(finished, "excluded", 0.0, tries, seconds, f"unresolved: {result.reason}")
                await asyncio.sleep(BACKOFF_S * 2 ** (tries - 1))
        finally:
            output.close(outcome)

    async def _once(self, finished: ExecutionFinished, artifact: BlobRef, output: BoundedLog) -> Reward | Unresolved:
        try:
            task = self._load(Path(finished.task))
        except BrokenTask as error:
            return Unresolved(str(error))
        folder = self.ctx.run_dir / "work" / f"{WORK}{os.getpid()}-{finished.execution}"
        return await score(self.tools, self.ctx.blobs, self._examination(task, artifact, folder), output.write)

    def _examination(self, task: Task, artifact: BlobRef, folder: Path) -> Examination:
        own, ours = task.verifier_timeout_s, self.ctx.config.assessment.timeout_s
        limits = self.ctx.config.execution
        return Examination(
            task=task,
            artifact=artifact,
            folder=folder,
            limits=sandbox.Limits(memory_mb=limits.memory_mb, processes=limits.processes, disk_mb=limits.disk_mb),
            timeout_s=ours if own is None else min(own, ours),
        )


def _remove_leftovers(work: Path) -> None:
    """Workspaces of evaluator processes that were killed."""
    for folder in work.glob(f"{WORK}*"):
        pid = folder.name.removeprefix(WORK).partition("-")[0]
        if not Path("/proc", pid).exists():
            workspaces.remove(folder)
