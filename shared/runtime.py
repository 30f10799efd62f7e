"""The shell that drives a core over the run's stream, and the frame of every service process.

Invariant (exactly once): however often the process is killed, at whatever instant, the stream ends up with each effect
of each event once. A start plays the history (or a snapshot and the rest of it) through the core and compares the
effects with what this actor has in the stream (headers Gyre-Actor, Gyre-Cause); missing ones are published then. Each
publish carries the message id "<actor>.<cause>", so that even two processes of one actor at once store it once.

A core that raises on an event does not stop the service: the state goes back to what it was before the event
(Player.rewind, then a second pass over the stream since the base), a DeadLetter is published, and that event is
skipped in all later replays.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from shared import ids
from shared.actor import Core, Do, Publish
from shared.blobs import write_atomically
from shared.codec import event_name
from shared.events import Event, TimerFired
from shared.player import ACTOR, CAUSE, DEAD, Caused, HandlerFailed, Player, dead_lettered
from shared.player import replay as replay
from shared.service import ServiceContext as ServiceContext
from shared.service import end_tasks
from shared.service import run_service as run_service
from shared.service import serve_main as serve_main
from shared.stored import Stored

log = logging.getLogger("gyre.runtime")

Step = Callable[[str, Stored | None], None]
DIGEST = 32
LONGEST_SLEEP_S = 3600.0


class NobodyPerforms(RuntimeError):
    """The core gave a Do, and the service passed no `perform`."""


def _no_step(_name: str, _message: Stored | None) -> None:
    return None


def _no_trace(event: Event) -> str:
    return ""


async def drive(
    ctx: ServiceContext,
    core: Core,
    *,
    perform: Callable[[object], Awaitable[None]] | None = None,
    on_live: Callable[[], Awaitable[None]] | None = None,
    observe: Callable[[Stored], None] | None = None,
    snapshot_every: int = 0,
    step: Step = _no_step,
    begins: Callable[[Event], str] = _no_trace,
) -> None:
    """Run `core` over the stream until `ctx.stop` is set.

    History: effects are compared with the stream, missing ones published, Do suppressed. Then `on_live` once. Live:
    each Do is given to `perform` in a task of its own, started in order of the effects; if one raises, drive raises it.
    `observe` sees each message after the core has handled it and before its effects are carried out, history included
    (from the snapshot on, if there is one). `snapshot_every`: events between two snapshots, 0 = none; the core needs
    `restore(data)` then. `begins`: name of the trace that an event begins, "" if it continues that of its cause. `step`
    is told the name of each step; tests kill the process there."""
    driver = _Driver(ctx, core, perform, observe, snapshot_every, step, begins)
    main = asyncio.create_task(driver.run(on_live), name=f"drive {ctx.actor}")
    stop = asyncio.create_task(ctx.stop.wait())
    try:
        waited: set[asyncio.Future[Any]] = {main, stop, driver.failed}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            main.result()
        if driver.failed.done():
            driver.failed.result()
    finally:
        # Cancelling between any two steps is as harmless as being killed there.
        driver.failed.cancel()
        await end_tasks([main, stop], again_s=1.0)
        await end_tasks(driver.tasks)


class _Driver:
    def __init__(
        self,
        ctx: ServiceContext,
        core: Core,
        perform: Callable[[object], Awaitable[None]] | None,
        observe: Callable[[Stored], None] | None,
        snapshot_every: int,
        step: Step,
        begins: Callable[[Event], str],
    ) -> None:
        self.ctx, self.bus = ctx, ctx.bus
        self.player = Player(core, ctx.actor)
        self.perform, self.observe, self.step, self.begins = perform, observe, step, begins
        self.snapshot_every = snapshot_every
        self.snapshot_path = ctx.run_dir / "snapshots" / f"{ctx.actor}.snapshot"
        self.tasks: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.live = False
        self.unpublished: dict[str, Caused] = {}
        self._timers_changed = asyncio.Event()
        self._rewinding = False

    async def run(self, on_live: Callable[[], Awaitable[None]] | None) -> None:
        end = await self.bus.last_sequence()
        self.player.skip |= await self._skipped()
        self._restore(end)
        if self.player.sequence >= end:
            await self._go_live(on_live)
        async for message in self.bus.read(self.player.sequence + 1):
            self.step("read", message)
            effects = await self._play(message)
            if self.observe is not None:
                self.observe(message)
            if self.live:
                await self._carry_out(effects, message)
            else:
                self._account(effects, message)
                if message.sequence >= end:
                    await self._go_live(on_live)
            if self.snapshot_every and self.live and message.sequence % self.snapshot_every == 0:
                await self._snapshot(message)

    # -------------------------------------------------------------------------------------------------- history

    async def _skipped(self) -> set[int]:
        """Events that this actor dead-lettered in an earlier life."""
        end = await self.bus.last_sequence()
        letters = ids.dead_letter_subject(self.ctx.run, self.bus.service)
        return dead_lettered([m async for m in self.bus.read_until(end, subject=letters)], self.ctx.actor)

    def _account(self, effects: list[Caused], message: Stored) -> None:
        for caused in effects:
            if isinstance(caused.effect, Publish):
                self.unpublished[caused.cause] = caused
        if message.headers.get(ACTOR) == self.ctx.actor and not isinstance(message.event, TimerFired):
            cause = message.headers.get(CAUSE, "")
            done = self.unpublished.pop(cause, None)
            if done is not None and done.data != message.data:
                log.error("replay of %s differs at %s: the core is not deterministic, or was changed", cause, message)

    async def _go_live(self, on_live: Callable[[], Awaitable[None]] | None) -> None:
        missing, self.unpublished = list(self.unpublished.values()), {}
        if missing:
            log.info("publishing %d effects that the last process left open", len(missing))
        for caused in missing:
            self.step("before missing", None)
            await self._publish(caused)
            self.step("after missing", None)
        self.live = True
        log.info("live at sequence %d", self.player.sequence)
        self._start(self._fire_timers())
        if on_live is not None:
            await on_live()

    # ----------------------------------------------------------------------------------------------------- live

    async def _play(self, message: Stored) -> list[Caused]:
        if message.event is None:
            await self.bus.publish_dead_letter(
                message, f"undecodable: {message.undecodable}", msg_id=f"undecodable.{message.sequence}"
            )
        try:
            effects = self.player.apply(message)
        except HandlerFailed as failure:
            name = event_name(message.event) if message.event else "?"
            log.exception("%s failed on event %d (%s); skipped", self.ctx.actor, message.sequence, name)
            await self._rewind(message)
            headers = {ACTOR: self.ctx.actor, CAUSE: f"{message.sequence}.{DEAD}"}
            msg_id = f"{self.ctx.actor}.{message.sequence}.{DEAD}"
            await self.bus.publish_dead_letter(message, failure.reason, msg_id=msg_id, headers=headers)
            effects = []
        self._timers_changed.set()
        return effects

    async def _rewind(self, message: Stored) -> None:
        """The state as it was before `message`: everything since the base again, its effects being known."""
        self._rewinding = True  # the timers on the way are none
        base = self.player.rewind(message.sequence)
        async for earlier in self.bus.read_until(message.sequence, start=base + 1):
            self.player.apply(earlier)
        self._rewinding = False

    async def _carry_out(self, effects: list[Caused], message: Stored) -> None:
        for caused in effects:
            if isinstance(caused.effect, Publish):
                self.step(f"before publish {caused.cause.split('.')[1]}", message)
                await self._publish(caused)
                self.step(f"after publish {caused.cause.split('.')[1]}", message)
            elif isinstance(caused.effect, Do):
                if self.perform is None:
                    raise NobodyPerforms(f"{self.ctx.actor} wants {caused.effect.command!r}: pass `perform` to drive")
                self._start(self.perform(caused.effect.command))
        self.step("done", message)

    async def _publish(self, caused: Caused) -> None:
        assert isinstance(caused.effect, Publish)
        event = caused.effect.event
        headers = {ACTOR: self.ctx.actor, CAUSE: caused.cause}
        subject = ids.subject(self.ctx.run, self.bus.service, event.entity(), event_name(event))
        if name := self.begins(event):
            with self.ctx.telemetry.span(name, None, {"entity": event.entity()}):
                self.ctx.telemetry.inject(headers)
        elif caused.traceparent:
            headers["traceparent"] = caused.traceparent
        await self.bus.publish_bytes(subject, caused.data, msg_id=f"{self.ctx.actor}.{caused.cause}", headers=headers)

    def _start(self, action: Awaitable[None]) -> None:
        task = asyncio.ensure_future(action)
        assert isinstance(task, asyncio.Task)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            self.failed.set_exception(task.exception())  # type: ignore[arg-type]

    # --------------------------------------------------------------------------------------------------- timers

    async def _fire_timers(self) -> None:
        """Publish TimerFired for each timer that is due; the answer comes back through the stream."""
        fired: set[str] = set()
        while True:
            self._timers_changed.clear()
            timers = {} if self._rewinding else self.player.timers
            waiting = {key: timer for key, timer in timers.items() if timer.cause not in fired}
            now = time.time()
            for key, timer in waiting.items():
                if timer.at <= now:
                    fired.add(timer.cause)
                    await self._fire(key, timer.cause)
            if not self._rewinding:
                fired &= {timer.cause for timer in self.player.timers.values()}
            ahead = [timer.at for timer in waiting.values() if timer.at > now]
            await _wait(self._timers_changed, min([at - time.time() for at in ahead] + [LONGEST_SLEEP_S]))

    async def _fire(self, key: str, cause: str) -> None:
        await self.bus.publish(
            TimerFired(service=self.bus.service, key=key),
            msg_id=f"{self.ctx.actor}.{cause}.timer",
            headers={ACTOR: self.ctx.actor, CAUSE: cause},
        )

    # ------------------------------------------------------------------------------------------------ snapshots

    async def _snapshot(self, message: Stored) -> None:
        """Only between two events, when all effects so far are acknowledged: a restart from it owes nothing older."""
        self.step("before snapshot", message)
        data = self.player.snapshot()
        self.snapshot_path.parent.mkdir(parents=True, exist_ok=True)
        whole = hashlib.blake2b(data, digest_size=DIGEST).digest() + data
        await asyncio.to_thread(write_atomically, self.snapshot_path, whole)
        self.step("after snapshot", message)

    def _restore(self, end: int) -> None:
        if not self.snapshot_every or not self.snapshot_path.exists():
            return
        whole = self.snapshot_path.read_bytes()
        digest, data = whole[:DIGEST], whole[DIGEST:]
        try:
            if hashlib.blake2b(data, digest_size=DIGEST).digest() != digest:
                raise ValueError("its digest is wrong")
            self.player.restore(data)
            if self.player.sequence > end:
                raise ValueError(f"it is of sequence {self.player.sequence}, the stream ends at {end}")
        except (ValueError, TypeError, KeyError) as error:
            log.warning("snapshot %s is not used (%s): playing the whole history", self.snapshot_path, error)
            self.player.rewind(0)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
