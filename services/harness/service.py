"""Shell of the harness service: takes placed executions from the work queue and runs each to its end.

Invariant: an item is acknowledged only when its ExecutionFinished is durable; when this process stops, all its
sandboxes are gone and its items are given back, to be taken again with a higher attempt number. How many run at once
is the scheduler's decision: every placed execution starts right away.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from pathlib import Path

from services.harness import execution as one
from services.harness.attempts import Ledger
from services.harness.model_link import ModelLink
from services.harness.profiles import Profile, profile
from shared import ids, sandbox
from shared import workspace as workspaces
from shared.bus import WorkItem
from shared.cancelling import end_all
from shared.events import ExecutionFinished, ExecutionPlaced, ExecutionStarted, ProxyReady
from shared.following import Following
from shared.runtime import ServiceContext, drive
from shared.stored import Stored
from shared.tasks import load

log = logging.getLogger("gyre.harness")

QUEUE = "harness"
TAKE_S = 20.0
ACK_WAIT_S = 30.0  # a killed process's items go to the next one after this long
MAX_IN_FLIGHT = 10_000  # beyond any pool's capacity: the scheduler limits, not the queue
GIVE_UP_AFTER = 5  # deliveries that ended in an unexpected error


async def serve(ctx: ServiceContext) -> None:
    """Run until ctx.stop. Raises SandboxMissing or HarnessMissing if this machine cannot start the run's harness."""
    known = profile(ctx.config.harness)
    scratch = ctx.run_dir / "work" / f"sandbox-{ctx.actor}-{os.getpid()}"
    try:
        service = HarnessService(ctx, await sandbox.find(scratch), known)
        async with asyncio.TaskGroup() as group:
            group.create_task(drive(ctx, service.ledger, on_live=service.stream.go_live, observe=service.observe))
            group.create_task(service.work())
    finally:
        workspaces.remove(scratch)


class HarnessService:
    def __init__(self, ctx: ServiceContext, tools: sandbox.Bubblewrap, known: Profile) -> None:
        self.ctx = ctx
        self.ledger = Ledger()
        self.link = ModelLink()
        self.stream = Following()
        self._running: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.around = one.Surroundings(
            config=ctx.config,
            run_dir=ctx.run_dir,
            blobs=ctx.blobs,
            tools=tools,
            profile=known,
            route=self._route,
            publish_started=self._publish_started,
            load_task=functools.lru_cache(maxsize=1024)(load),
        )

    # ------------------------------------------------------------------------------------------- following the run

    def observe(self, message: Stored) -> None:
        event = message.event
        if isinstance(event, ExecutionStarted | ExecutionFinished):
            number, task = self._running.get(event.execution, (event.attempt, None))
            if task is not None and self.ledger.superseded(event.execution, number) and number != event.attempt:
                log.warning("%s attempt %d gives way to attempt %d", event.execution, number, event.attempt)
                task.cancel()
        elif isinstance(event, ProxyReady) and self.stream.live and self._running:
            try:
                self._link(event)  # for the executions that are running
            except OSError as error:
                log.warning("the proxy's socket %s cannot be reached: %s", event.socket, error)
        self.stream.observe(message)

    # -------------------------------------------------------------------------------------------------------- work

    async def work(self) -> None:
        """Take items until ctx.stop; then end everything."""
        stop = asyncio.create_task(self.ctx.stop.wait())
        taking = asyncio.create_task(self._take_all())
        try:
            await asyncio.wait({stop, taking}, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                taking.result()
        finally:
            await end_all([stop, taking])  # before the others, so that it does not take what they give back
            await end_all(self._tasks)
            self.link.close()

    async def _take_all(self) -> None:
        await self.stream.until(lambda: self.stream.live)
        placed = ids.subject_filter(self.ctx.run, service="scheduler", event="execution_placed")
        queue = await self.ctx.bus.work_queue(QUEUE, placed, ack_wait_s=ACK_WAIT_S, max_in_flight=MAX_IN_FLIGHT)
        try:
            while not self.ctx.stop.is_set():
                await self.stream.until(lambda: not self.ledger.stopping)
                item = await queue.take(TAKE_S)
                if item is not None:
                    task = asyncio.create_task(self._handle(item), name=f"item {item.sequence}")
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        finally:
            await queue.close()  # or what goes back comes to a request of ours that nobody waits for any more

    async def _handle(self, item: WorkItem) -> None:
        """One delivery, to its acknowledgement."""
        placed = item.event
        if not isinstance(placed, ExecutionPlaced):
            await item.dead_letter(f"the harness queue takes ExecutionPlaced, not {type(placed).__name__}")
            return
        try:
            async with item.heartbeat():
                await self._execute(item, placed)
        except asyncio.CancelledError:
            if self.ctx.stop.is_set():
                await item.nak()
            raise
        except Exception as error:  # the edge of one item: the others go on, this one is tried again
            log.exception("%s, delivery %d", placed.execution, item.deliveries)
            if item.deliveries < GIVE_UP_AFTER:
                await item.nak(min(2.0**item.deliveries, 30.0))
            else:
                await self._finish(item, _given_up(placed, item.deliveries, error))

    async def _execute(self, item: WorkItem, placed: ExecutionPlaced) -> None:
        if item.deliveries > 1 or placed.execution in self._running:
            await self.stream.caught_up(self.ctx.bus)
        if placed.execution in self._running:  # a redelivery after an interruption of the bus
            await asyncio.wait({self._running[placed.execution][1]})
            await self.stream.caught_up(self.ctx.bus)
        if placed.execution in self.ledger.finished:
            await item.ack()
            return
        number = self.ledger.next_attempt(placed.execution, item.deliveries)
        current = asyncio.current_task()
        assert current is not None
        self._running[placed.execution] = (number, current)
        try:
            dispatched_at = self.ledger.dispatched_at.get(placed.execution, item.stored.time)
            finished = await one.run(self.around, placed, number, dispatched_at)
            if not self.ledger.superseded(placed.execution, number):
                await self._finish(item, finished)
        finally:
            del self._running[placed.execution]

    async def _finish(self, item: WorkItem, finished: ExecutionFinished) -> None:
        await self.ctx.bus.publish(finished, msg_id=f"{finished.execution}-{finished.attempt}-finished")
        await item.ack()

    async def _publish_started(self, started: ExecutionStarted) -> None:
        await self.ctx.bus.publish(started, msg_id=f"{started.execution}-{started.attempt}-started")

    # ------------------------------------------------------------------------------------------------- the model API

    async def _route(self) -> one.ModelRoute:
        """Waits until a proxy is ready. Raises OSError if its socket is not there."""
        await self.stream.until(lambda: self.ledger.proxy is not None)
        proxy = self.ledger.proxy
        assert proxy is not None
        if self.ctx.config.execution.network == "host":
            return one.route_to(None, proxy.url)
        return one.route_to(self._link(proxy), proxy.url)

    def _link(self, proxy: ProxyReady) -> Path:
        return self.link.renew(Path(proxy.socket))


def _given_up(placed: ExecutionPlaced, deliveries: int, error: Exception) -> ExecutionFinished:
    return ExecutionFinished(
        execution=placed.execution,
        group=placed.group,
        task=placed.task,
        attempt=deliveries,
        ending="failed_to_start",
        exit_code=None,
        artifact=None,
        seconds=0.0,
        cpu_seconds=0.0,
        detail=f"given up after {deliveries} deliveries: {type(error).__name__}: {error}",
    )
