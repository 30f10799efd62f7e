"""One incarnation of a cell: its engine, its training workers, and the carrying out of the core's commands.

Invariants: what touches workers or weights happens in the order in which the core asked for it, one at a time
(`_hand`); what only starts, stops or settles something happens at once. When a part fails, `ended` resolves with the
reason and the incarnation does nothing more. An optimizer step that began is followed by its checkpoint, its snapshot
and its BatchCommitted, or by the end of this incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cell_agent import commands as do
from services.cell_agent.checkpoints import checkpoint_path, prune
from services.cell_agent.claims import Claims, forget_queues
from services.cell_agent.core import CORE, CellCore
from services.cell_agent.engine.server import Engine, EngineFailed, resolve_device, spec_of
from services.cell_agent.handover import Mover, Traces
from services.cell_agent.logs import log_tail
from services.cell_agent.roles import Role
from services.cell_agent.trainer.launcher import TrainerError, TrainerHandle, launch
from services.cell_agent.workers import Workers
from shared import events as ev
from shared.runtime import ServiceContext

log = logging.getLogger("gyre.cell")

ORDER = "order"  # key of the headers of this cell's last role order
DRAIN_POLL_S = 0.2
HEALTH_EVERY_S = 10.0
HEALTH_MISSES = 3


@dataclass(frozen=True)
class Failure:
    """Why an incarnation ended. `part`: engine, trainer, receiver; `engine_usable`: the next one may go on with it."""

    part: str
    reason: str
    log_tail: str
    engine_usable: bool


class Life:
    """Made with a fresh incarnation id; the core's BringUp starts it. `engine`: a healthy one of the life before."""

    def __init__(
        self,
        ctx: ServiceContext,
        core: CellCore,
        incarnation: str,
        engine: Engine | None,
        mover: Mover,
        traces: Traces,
        kv_secret: str = "",
    ) -> None:
        self.ctx, self.core, self.cell, self.incarnation = ctx, core, core.state.cell, incarnation
        self._mover, self._traces, self._kv_secret = mover, traces, kv_secret
        self._switch: dict[str, str] = {}  # trace of the change of role that is under way
        self.config = ctx.config
        self._other_part = "trainer" if core.state.trains else "receiver"  # what stands beside the engine
        self.device = resolve_device(ctx.config.cells.device)
        self.ended: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self.served = False  # engine and trainer stood
        self._engine = engine
        self._engine_up = asyncio.Event()
        self._engine_in_doubt = False  # between two versions
        self._workers: Workers | None = None
        self._hand = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._claims: Claims | None = None
        self._draining: asyncio.Task[Any] | None = None
        self._reducing: tuple[int, int] | None = None
        self._worth_waiting = False  # a commit or an export is under way
        self._void: set[tuple[int, int]] = set()

    # ------------------------------------------------------------------------------------------------- commands

    def submit(self, command: object) -> None:
        """Carry out a command of the core, if it was meant for this incarnation."""
        if not isinstance(command, do.Command) or command.incarnation != self.incarnation or self.ended.done():
            return
        match command:
            case do.BringUp():
                self._start(self._start_engine())
                self._in_turn(self._bring_up, command)
            case do.Admit():
                self._start(self._admit(command))
            case do.Drain():
                self._draining = self._start(self._drain(command))
            case do.CancelDrain():
                self._cancel_drain()
            case do.Adopt():
                self._start(self._adopt(command))
            case do.Release():
                self._start(self._release(command))
            case do.Claim():
                self._claim(command)
            case do.Count():
                self._start(self._count())
            case do.Seal():
                if self._claims is not None:
                    self._claims.sealed = True
            case do.Settle():
                self._start(self._settle(command))
            case do.Abandon():
                self._give_up(command.batch, command.attempt, "its batch was opened again, or the cell leaves it")
                self._start(self._give_back())
            case do.LostMember():
                self._lost_member(command)
            case do.Restart():
                self._fail("trainer", command.reason)
            case do.Join():
                self._in_turn(self._join, command)
            case do.Commit():  # a Reduce, too
                self._in_turn(self._commit, command)
            case do.Reduce():
                self._in_turn(self._reduce, command)
            case do.Refit():
                self._in_turn(self._refit, command)
            case do.Export():
                self._in_turn(self._export, command)

    def _in_turn(self, action: Callable[[Any], Awaitable[object]], command: do.Command) -> None:
        async def wait_and_act() -> None:
            async with self._hand:  # a fair lock: first come, first served
                await action(command)

        self._start(wait_and_act())

    def _start(self, action: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        task = asyncio.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, EngineFailed):
            self._fail("engine", error.reason)
        elif isinstance(error, TrainerError):
            self._fail(self._other_part, str(error))
        elif not self.ended.done():
            self.ended.set_exception(error)  # a fault of ours: ends the process, with its traceback

    def _fail(self, part: str, reason: str) -> None:
        if self.ended.done():
            return
        log.error("cell %d: %s failed: %s", self.cell, part, reason)
        usable = part != "engine" and not self._engine_in_doubt
        self.ended.set_result(Failure(part, reason, log_tail(self._log(part)), usable))

    def _log(self, part: str) -> Path:
        return self.ctx.run_dir / "logs" / f"{part}-{self.cell}.log"

    async def _publish(self, event: ev.Event) -> None:
        await self.ctx.bus.publish(event)

    def _still_there(self, weights: ev.WeightsPublished) -> bool:
        return self.core.state.weights.get(weights.version) == weights

    @property
    def workers(self) -> Workers:
        assert self._workers is not None  # commands that need them follow CellTrainerReady
        return self._workers

    # ------------------------------------------------------------------------------------------ start and watch

    async def _start_engine(self) -> None:
        if self._engine is None:
            self._engine = await Engine.start(
                spec_of(self.config, self.cell, self.device, self._kv_secret), self._log("engine")
            )
        self._engine_up.set()
        self._start(self._watch_engine(self._engine))

    async def _watch_engine(self, engine: Engine) -> None:
        misses = 0
        while misses < HEALTH_MISSES:
            done, _ = await asyncio.wait([engine.exited], timeout=HEALTH_EVERY_S)
            if done:
                raise EngineFailed(
                    f"engine of cell {self.cell} died with exit code {engine.exited.result()}", engine.log
                )
            misses = 0 if await engine.healthy() else misses + 1
        raise EngineFailed(f"engine of cell {self.cell} answered no health check {HEALTH_MISSES} times", engine.log)

    async def _watch_trainer(self, handle: TrainerHandle) -> None:
        outcome = await asyncio.shield(handle.exited)
        if not outcome.asked:
            part = self._other_part
            self._fail(part, f"the {part} of cell {self.cell} {outcome.how}")

    async def _bring_up(self, command: do.BringUp) -> None:
        handle = await launch(
            cell=self.cell,
            config=self.config,
            run_dir=self.ctx.run_dir,
            log_path=self._log(self._other_part),
            device=self.device,
            trains=self.core.state.trains,
        )
        self._workers = Workers(handle, self.cell, self.incarnation)
        self._start(self._watch_trainer(handle))
        if not self.core.state.trains:
            return
        if self.cell == CORE:
            await self._workers.load(self.config.model.path, command.checkpoint, command.version)
        store = handle.hello.store
        await self._publish(
            ev.CellTrainerReady(cell=self.cell, incarnation=self.incarnation, version=command.version, store=store)
        )
        if self.cell == CORE:
            await self._publish(await self._workers.snapshot(command.version))

    async def _admit(self, command: do.Admit) -> None:
        await self._engine_up.wait()
        async with self._hand:
            assert self._engine is not None
            wanted = command.weights.version if command.weights is not None else 0
            if self.served or (command.weights is not None and await self._bring_to(command.weights) is None):
                return  # done before; or the core was lost, or went on: a new Admit follows with its new snapshot
            if self._engine.version != wanted:
                raise EngineFailed(f"engine is at version {self._engine.version}, not {wanted}", self._engine.log)
            self.served = True
            await self._publish(
                ev.CellEngineReady(
                    cell=self.cell,
                    incarnation=self.incarnation,
                    url=self._engine.url,
                    version=wanted,
                    capacity=self.config.cells.capacity,
                    offers=self.workers.handle.hello.offers,
                )
            )

    # -------------------------------------------------------------------------------------------------- weights

    async def _bring_to(self, weights: ev.WeightsPublished) -> dict[str, float] | None:
        """Put `weights` into the engine: what it took (CellRefitted). None if the core was lost, or had published two
        newer ones, before they were here."""
        assert self._engine is not None
        if self._engine.version == weights.version:
            return {}
        steps = await self._pull(weights, load=False)
        if steps is None:
            return None
        self._engine_in_doubt = True
        pushed = await self.workers.push(self._engine.url, weights.version)
        self._engine_in_doubt = False
        self._engine.version = weights.version
        return steps | pushed

    async def _pull(self, weights: ev.WeightsPublished | None, *, load: bool) -> dict[str, float] | None:
        """Workers.pull; the core holds its weights already."""
        if weights is None or self.cell == CORE:
            return {}
        return await self.workers.pull(weights, self.core.sources, self._still_there, load=load)

    async def _refit(self, command: do.Refit) -> None:
        await self._engine_up.wait()
        started, version = time.monotonic(), command.weights.version
        with self._span("refit", cell=self.cell, version=version):
            steps = await self._bring_to(command.weights)
            if steps is not None:
                await self._publish(
                    ev.CellRefitted(
                        cell=self.cell,
                        incarnation=self.incarnation,
                        version=version,
                        seconds=time.monotonic() - started,
                        steps=steps,
                    )
                )

    async def _export(self, command: do.Export) -> None:
        self._worth_waiting = True
        folder = self.ctx.run_dir / "policy"
        await self.workers.export(folder, self.config.model.path)
        await self._publish(ev.PolicyExported(version=command.version, path=str(folder)))
        self._worth_waiting = False

    # --------------------------------------------------------------------------------------- leaving rollout

    async def _drain(self, command: do.Drain) -> None:
        started = time.monotonic()
        await self._engine_up.wait()
        assert self._engine is not None
        live = self.config.cells.handover != "drain"
        with self._span("leave rollout", cell=self.cell, order=command.order):
            calls = await self._mover.clear(self._engine, command.order) if live else await self._run_dry(self._engine)
            await self._publish(
                ev.CellDrained(
                    cell=self.cell,
                    incarnation=self.incarnation,
                    order=command.order,
                    seconds=time.monotonic() - started,
                    calls=calls,
                )
            )
        if live:
            await self._mover.keep_clear(self._engine, command.order)

    @staticmethod
    async def _run_dry(engine: Engine) -> int:
        """Two looks in a row must find nothing: a call that was routed just before the move may still arrive."""
        quiet = 0
        while quiet < 2:
            quiet = quiet + 1 if await engine.live_calls() == 0 else 0
            await asyncio.sleep(DRAIN_POLL_S)
        return 0

    @contextlib.contextmanager
    def _span(self, name: str, *, within: bool = False, **attributes: int) -> Iterator[None]:
        """A span of the change of role that is under way; unless it is `within` it, it is its first one here, below the
        scheduler's order. A refit of a cell that stays in rollout is ordered by nobody else's trace."""
        stays = name == "refit" and self.core.state.role is not Role.RETURNING
        parent = self._switch if within else None if stays else self._traces(ORDER)
        with self.ctx.telemetry.span(name, parent, attributes):
            if not within:
                self._switch = {}
                self.ctx.telemetry.inject(self._switch)
            yield

    async def _adopt(self, command: do.Adopt) -> None:
        assert self._engine is not None  # the cell is in rollout
        await self._mover.adopt(self._engine, command.cut)

    async def _release(self, command: do.Release) -> None:
        assert self._engine is not None  # it holds the lease
        await self._mover.release(self._engine, command)

    def _cancel_drain(self) -> None:
        if self._draining is not None:
            self._draining.cancel()

    # -------------------------------------------------------------------------------------------------- batches

    async def _join(self, command: do.Join) -> None:
        await self._give_back()  # of an attempt that was given up
        workers, started = self.workers, time.monotonic()
        if (command.batch, command.attempt) in self._void or workers.version > command.version:
            return  # given up, or committed, while this waited for its turn
        with self._span("join batch", within=True, cell=self.cell, batch=command.batch):
            steps = await self._pull(command.weights, load=True)
            if steps is None:
                return
            pull_seconds = 0.0 if self.cell == CORE else time.monotonic() - started
            await workers.begin(command.batch, command.attempt, command.version)
            await self._publish(
                ev.CellJoinedBatch(
                    cell=self.cell,
                    incarnation=self.incarnation,
                    batch=command.batch,
                    attempt=command.attempt,
                    version=command.version,
                    pull_seconds=pull_seconds,
                    steps=steps,
                )
            )

    def _claim(self, command: do.Claim) -> None:
        stages = self.config.cells.pipeline_parallel
        self._claims = Claims(
            bus=self.ctx.bus,
            blobs=self.ctx.blobs,
            cell=self.cell,
            incarnation=self.incarnation,
            batch=command.batch,
            attempt=command.attempt,
            depth=stages + 1 if stages > 1 else 1,
            sealed=command.sealed,
            call=self.workers.call,
            elsewhere=self.core.trained_elsewhere,
        )
        self._start(self._claims.run())

    async def _give_back(self) -> None:
        claims, self._claims = self._claims, None
        if claims is not None:
            await claims.give_back()

    async def _settle(self, command: do.Settle) -> None:
        claims = self._claims
        if claims is not None and claims.batch == command.batch:
            self._claims = None
            await claims.settle(command.micro_steps)
        if self.cell == CORE:
            await forget_queues(self.ctx.bus, command.batch - 1)

    async def _reduce(self, command: do.Reduce) -> dict[str, float]:
        """Sum the gradients into the core's; {} if the attempt is void."""
        claims = self._claims
        if claims is not None:
            await claims.stop()
        if (command.batch, command.attempt) in self._void:
            return {}
        if (claims.trained if claims is not None else set()) != set(command.ours):
            self._fail("trainer", f"its gradients hold micro-steps of batch {command.batch} that others trained, too")
            return {}
        await self.workers.drain()
        if (command.batch, command.attempt) in self._void:
            return {}
        self._reducing = (command.batch, command.attempt)
        size = len(command.cells)
        metrics = await self.workers.reduce(command.group, command.rank, size, command.store)
        self._reducing = None
        return metrics | {"cells": float(size)}

    def _lost_member(self, command: do.LostMember) -> None:
        self._give_up(command.batch, command.attempt, f"cell {command.cell} was lost")

    def _give_up(self, batch: int, attempt: int, why: str) -> None:
        """The attempt is void. Before its sum: it will not be made. In it: our gradients may be half a sum, and the
        workers wait for a member that never comes. After it: nothing is lost."""
        self._void.add((batch, attempt))
        if self._reducing == (batch, attempt):
            self._fail("trainer", f"{why} while gradients of batch {batch} were summed")

    async def _commit(self, command: do.Commit) -> None:
        started = time.monotonic()
        self._worth_waiting = True
        metrics = await self._reduce(command)
        if not metrics:
            self._worth_waiting = False
            return
        metrics |= await self.workers.step(command.executions, command.version)
        folder = checkpoint_path(self.ctx.run_dir, command.version)
        metrics |= await self.workers.save(folder)
        await self._publish(await self.workers.snapshot(command.version))
        await self._publish(
            ev.BatchCommitted(
                batch=command.batch,
                attempt=command.attempt,
                version=command.version,
                cells=command.cells,
                micro_steps=command.micro_steps,
                checkpoint=str(folder),
                seconds=time.monotonic() - started,
                metrics=metrics,
            )
        )
        self._worth_waiting = False
        training = self.config.training
        prune(self.ctx.run_dir, newest=command.version, keep=training.keep_checkpoints, every=training.checkpoint_every)

    async def _count(self) -> None:
        engine = self._engine
        if engine is None or not engine.alive:
            return
        tokens = await engine.generated_tokens()
        await self._publish(
            ev.EngineCounted(
                cell=self.cell,
                incarnation=self.incarnation,
                engine=f"{engine.pid}@{engine.url}",
                generated_tokens=tokens,
            )
        )

    # ------------------------------------------------------------------------------------------------------ end

    async def halt(self, grace_s: float) -> None:
        """Carry out nothing more. A commit or an export that is under way gets `grace_s` to finish."""
        deadline = time.monotonic() + grace_s
        while self._worth_waiting and not self.ended.done() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        claims, tasks = self._claims, list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if claims is not None:
            await claims.drop()
        if grace_s > 0:
            await self._last_count()

    async def _last_count(self) -> None:
        try:
            await self._count()
        except EngineFailed as error:
            log.warning("cell %d: no last count of generated tokens: %s", self.cell, error.reason)

    async def close(self, keep_engine: bool) -> Engine | None:
        """After `halt`: end the processes. Returns the engine if it is to be kept and alive."""
        workers, engine = self._workers, self._engine
        self._workers = self._engine = None
        if workers is not None:
            await workers.handle.close(grace_s=2.0)
        if engine is None or (keep_engine and engine.alive):
            return engine
        await engine.stop()
        return None
