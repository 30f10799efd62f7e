"""One life's part in calls that move: cutting those that are live here, taking in pages, letting go of them.

Invariants: a call that is cut is told by CallCut, whatever became of its pages; a step that fails or takes too long
means that the prefix is computed again at the destination, never that the call waits for ever or is lost. While the
cell is out of rollout nothing stays live in its engine: a call that was sent before its sender knew is cut as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from services.cell_agent import commands as do
from services.cell_agent.core import CellCore
from services.cell_agent.engine.kv.errors import KvError
from services.cell_agent.engine.kv.wire import Lease
from services.cell_agent.engine.kv_client import KvClient
from services.cell_agent.engine.server import Engine
from services.cell_agent.moves import answer
from services.cell_agent.roles import Role
from shared import events as ev
from shared import ids
from shared.service import ServiceContext

log = logging.getLogger("gyre.cell.handover")

POLL_S = 0.05
CUT_S = 3.0  # a call that has not stopped and shown its pages by then moves without them
DROP_S = 0.5
INSIST_S = 1.0  # a call that is still live so long after it was cut is aborted again
LATE_S = 15.0  # so long after the last call, one may still arrive that was sent before the move was known
LATE_POLL_S = 0.5
OUT = (Role.DRAINING, Role.JOINING, Role.TRAINING)


Traces = Callable[[str], Mapping[str, str] | None]
"""Request id -> headers of the last message about its move; ORDER (life.py) -> of the cell's last role order."""


class Mover:
    """`kv` None: calls move without their pages."""

    def __init__(
        self, ctx: ServiceContext, core: CellCore, incarnation: str, kv: KvClient | None, traces: Traces
    ) -> None:
        self._ctx, self._core, self._incarnation, self._kv, self._traces = ctx, core, incarnation, kv, traces
        self._config = ctx.config.cells
        self._cell = core.state.cell
        self._cut: dict[str, float] = {}  # rid -> when
        self._calls = ctx.telemetry.counter("gyre_cell_calls_cut_total", "Live calls cut because the cell left rollout")
        self._adopted = ctx.telemetry.counter("gyre_cell_calls_adopted_total", "Calls moved here", ["outcome"])

    # ------------------------------------------------------------------------------------------------------ source

    async def clear(self, engine: Engine, order: int) -> int:
        """Cut what is live until nothing is: how many calls that were."""
        self._cut.clear()
        quiet = 0
        while quiet < 2:
            quiet = quiet + 1 if await self._round(engine, order) and await engine.live_calls() == 0 else 0
            await asyncio.sleep(POLL_S)
        return len(self._cut)

    async def keep_clear(self, engine: Engine, order: int) -> None:
        """Cut what arrives late, while the order stands."""
        last = time.monotonic()
        state = self._core.state
        while time.monotonic() < last + LATE_S:
            await asyncio.sleep(LATE_POLL_S)
            if state.order != order or state.role not in OUT:
                return
            if not await self._round(engine, order):
                last = time.monotonic()

    async def _round(self, engine: Engine, order: int) -> bool:
        """One look; True if nothing was live."""
        live = await engine.calls()
        now = time.monotonic()
        fresh = [rid for rid in live if rid not in self._cut]
        self._cut.update(dict.fromkeys(fresh, now))
        if fresh:
            await self._cut_all(engine, order, fresh)
        if any(now > self._cut[rid] + INSIST_S for rid in live):
            # An abort that came before the engine's scheduler knew the call was lost, and it takes no second one.
            await engine.abort_all()
        return not live

    async def _cut_all(self, engine: Engine, order: int, calls: list[str]) -> None:
        started = time.monotonic()
        leases: dict[str, Lease | None] = {}
        ours = [rid for rid in calls if ids.call_of(rid) is not None]
        if self._kv is not None:
            found = await asyncio.gather(*(self._pin(self._kv, engine, rid) for rid in ours))
            leases = dict(zip(ours, found, strict=True))
        rest = [rid for rid in calls if leases.get(rid) is None]
        stopped = {rid for rid, lease in leases.items() if lease is not None or self._destination(rid) >= 0}
        stopped |= set(await engine.abort(rest) if rest else ())
        self._calls.inc(len(stopped))
        seconds = time.monotonic() - started
        told = [rid for rid in ours if rid in stopped]
        await asyncio.gather(*(self._tell(engine, order, rid, leases.get(rid), seconds) for rid in told))

    def _destination(self, rid: str) -> int:
        named = ids.call_of(rid)
        return self._core.destination(named[1]) if named is not None else -1

    async def _pin(self, kv: KvClient, engine: Engine, rid: str) -> Lease | None:
        """Cut the call and hold its pages; None: it may be live still, and nothing is held."""
        lease = f"{rid}-{self._incarnation}"
        try:
            async with asyncio.timeout(CUT_S):
                return await kv.cut(engine.url, rid, lease, self._config.handover_hold_s)
        except (KvError, TimeoutError) as error:
            log.warning("cell %d: %s moves without its pages: %r", self._cell, rid, error)
            with contextlib.suppress(TimeoutError):  # the lease ends by itself
                async with asyncio.timeout(DROP_S):
                    await kv.drop(engine.url, lease)
            return None

    async def _tell(self, engine: Engine, order: int, rid: str, lease: Lease | None, seconds: float) -> None:
        named = ids.call_of(rid)
        assert named is not None
        call, execution = named
        event = ev.CallCut(
            rid=rid,
            call=call,
            execution=execution,
            from_cell=self._cell,
            to_cell=self._destination(rid),
            incarnation=self._incarnation,
            order=order,
            seconds=seconds,
        )
        if lease is not None:
            pages, blob = msgspec.msgpack.encode(lease), None
            if len(pages) > self._ctx.config.bus.blob_threshold_bytes:
                pages, blob = b"", await asyncio.to_thread(self._ctx.blobs.put, pages)
            event = msgspec.structs.replace(
                event,
                lease=lease.id,
                engine=engine.url,
                tokens=len(lease.tokens),
                hold_s=self._config.handover_hold_s,
                pages=pages,
                pages_blob=blob,
            )
        await self._ctx.bus.publish(event)

    async def release(self, engine: Engine, command: do.Release) -> None:
        """Let go of a lease, whether or not the destination has acknowledged it. A hung engine lets go by itself when
        the lease's time is over."""
        with self._ctx.telemetry.span("release call", self._traces(command.rid), {"rid": command.rid}):
            if self._kv is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CUT_S):
                        await self._kv.drop(engine.url, command.lease)
            await self._ctx.bus.publish(
                ev.CallReleased(
                    rid=command.rid,
                    execution=command.execution,
                    cell=self._cell,
                    incarnation=self._incarnation,
                    lease=command.lease,
                    outcome=command.outcome,
                )
            )

    # ------------------------------------------------------------------------------------------------- destination

    async def adopt(self, engine: Engine, cut: ev.CallCut) -> None:
        """Read the pages into our engine; say how the call goes on, in any case and in time."""
        started = time.monotonic()
        with self._ctx.telemetry.span("adopt call", self._traces(cut.rid), {"rid": cut.rid, "tokens": cut.tokens}):
            event = await self._take(engine, cut)
            event = msgspec.structs.replace(event, seconds=time.monotonic() - started)
            self._adopted.labels(event.outcome).inc()
            await self._ctx.bus.publish(event)

    async def _take(self, engine: Engine, cut: ev.CallCut) -> ev.CallAdopted:
        if self._kv is None:
            return answer(cut, self._cell, self._incarnation, "recompute", detail="pages are not moved in this run")
        try:
            data = cut.pages if cut.pages_blob is None else await asyncio.to_thread(self._ctx.blobs.get, cut.pages_blob)
            lease = msgspec.msgpack.decode(data, type=Lease)
            async with asyncio.timeout(self._config.handover_timeout_s + CUT_S):
                moved = await self._kv.move(cut.engine, engine.url, lease, timeout_s=self._config.handover_timeout_s)
        except (KvError, TimeoutError, OSError, LookupError, ValueError) as error:
            log.warning("cell %d: the pages of %s did not come: %r", self._cell, cut.rid, error)
            return answer(cut, self._cell, self._incarnation, "failed", detail=f"{type(error).__name__}: {error}")
        if moved.tokens == 0:
            outcome = "recompute" if moved.reason == "recompute_faster" else "failed"
            return answer(cut, self._cell, self._incarnation, outcome, detail=moved.reason)
        return answer(cut, self._cell, self._incarnation, "pages", tokens=moved.tokens, extra_key=moved.extra_key)
