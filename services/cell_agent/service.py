"""The cell agent's shell: lives of the cell, one after the other, driven by the core over the stream.

Invariant: at most one life owns the cell, and it is announced by CellStarted before it does anything. When one ends it
does nothing more, is told by CellFailed, is taken down to the last process (a healthy engine may be passed on), and is
followed by the next; a cell that cannot get to its feet several times in a row ends the process with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from services.cell_agent.core import CellCore
from services.cell_agent.engine.kv.secret import run_secret
from services.cell_agent.engine.kv_client import KvClient
from services.cell_agent.engine.server import Engine
from services.cell_agent.handover import Mover
from services.cell_agent.life import ORDER, Failure, Life
from shared.events import CallAdopted, CallCut, CellFailed, CellRoleOrdered, CellStarted
from shared.runtime import ServiceContext, drive
from shared.stored import Stored
from shared.telemetry import Trail

log = logging.getLogger("gyre.cell")

STARTS_IN_A_ROW = 3
LEAST_PAGE = 16  # making pages readable costs time per page, more than linearly: one-token pages took seconds a call
COMMIT_GRACE_S = 8.0


class CellLost(RuntimeError):
    """The cell cannot be brought up; the message carries the reason and the end of the log."""


class CellAgent:
    """Makes lives and hands the core's commands to the present one."""

    def __init__(self, ctx: ServiceContext, core: CellCore) -> None:
        self.ctx, self.core = ctx, core
        self.life: Life | None = None
        cells = ctx.config.cells
        self._with_pages = cells.handover in ("live", "pages") and cells.engine_page >= LEAST_PAGE
        # Also for `keep`: the plugin that moves pages is the one that keeps new calls off those of older weights.
        self.secret = run_secret(ctx.run_dir) if self._with_pages or cells.kv_stale == "keep" else ""
        self._kv: KvClient | None = None
        self._trail = Trail()  # request ids: the last word on their move; ORDER: the last role order

    def observe(self, message: Stored) -> None:
        if isinstance(message.event, CallCut | CallAdopted):
            self._trail.note(message.event.rid, message.headers)
        elif isinstance(message.event, CellRoleOrdered) and message.event.cell == self.core.state.cell:
            self._trail.note(ORDER, message.headers)

    async def perform(self, command: object) -> None:
        if self.life is not None:
            self.life.submit(command)

    async def live(self) -> None:
        """Lives until cancelled; raises CellLost, or a fault of ours."""
        engine: Engine | None = None
        failed_starts = 0
        if self._with_pages:
            self._kv = KvClient(self.secret, always=self.ctx.config.cells.handover == "pages")
        try:
            while True:
                incarnation = uuid.uuid4().hex[:12]
                mover = Mover(self.ctx, self.core, incarnation, self._kv, self._trail.get)
                life = self.life = Life(self.ctx, self.core, incarnation, engine, mover, self._trail.get, self.secret)
                engine = None
                await self._publish(CellStarted(cell=life.cell, incarnation=life.incarnation))
                failure = await life.ended
                failed_starts = 0 if life.served else failed_starts + 1
                if failed_starts >= STARTS_IN_A_ROW:
                    raise CellLost(f"cell {life.cell} failed {failed_starts} starts in a row: {failure.reason}")
                await life.halt(0.0)
                await self._tell(life, failure)
                engine = await life.close(keep_engine=failure.engine_usable)
        finally:
            if engine is not None:
                await engine.stop()

    async def _tell(self, life: Life, failure: Failure) -> None:
        event = CellFailed(
            cell=life.cell,
            incarnation=life.incarnation,
            part=failure.part,
            reason=failure.reason,
            log_tail=failure.log_tail,
        )
        await self._publish(event)

    async def _publish(self, event: CellStarted | CellFailed) -> None:
        await self.ctx.bus.publish(event)

    async def close(self, grace_s: float) -> None:
        if self.life is not None:
            await self.life.halt(grace_s)
            await self.life.close(keep_engine=False)
        if self._kv is not None:
            await self._kv.close()


async def serve(ctx: ServiceContext) -> None:
    """Entry point of `gyre serve cell-agent --cell K`."""
    cell = int(ctx.args["cell"])
    core = CellCore(cell, trains=cell < ctx.config.cells.count)
    agent = CellAgent(ctx, core)
    caught_up = asyncio.Event()

    async def on_live() -> None:
        caught_up.set()

    async def live() -> None:
        await caught_up.wait()
        await agent.live()

    driving = asyncio.create_task(
        drive(ctx, core, perform=agent.perform, on_live=on_live, observe=agent.observe), name="drive"
    )
    living = asyncio.create_task(live(), name="lives")
    grace_s = 0.0
    try:
        done, _ = await asyncio.wait([driving, living], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        grace_s = COMMIT_GRACE_S
    finally:
        driving.cancel()
        living.cancel()
        await asyncio.gather(driving, living, return_exceptions=True)
        await agent.close(grace_s)
