"""What a cell's core knows of calls that move between cells: where its executions went, which pages it holds. Pure.

Invariants: every CallCut with a lease of ours is followed by exactly one CallReleased: after the destination's word,
when the lease has run out, or when this cell is lost. Every CallCut that comes to this cell while it lives is answered
by one CallAdopted.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from services.cell_agent import commands as do
from services.cell_agent.roles import Role
from shared import events as ev
from shared.actor import Do, Effect, Publish, Wake

TIMER = "lease."  # + rid
OUTCOMES = {"pages": "adopted", "recompute": "unneeded", "failed": "failed"}  # CallAdopted's -> CallReleased's


class Held(msgspec.Struct):
    """A lease at our engine that is not released; `releasing`: the shell was asked to."""

    execution: str
    lease: str
    releasing: bool = False


class Moves(msgspec.Struct):
    routes: dict[str, int] = {}  # execution -> cell, of those that left this cell since it last entered rollout
    leases: dict[str, Held] = {}  # rid -> lease

    def moved(self, cell: int, event: ev.ExecutionMoved) -> None:
        if event.to_cell == cell:  # back, or here again after this cell was lost
            self.routes.pop(event.execution, None)
        elif event.from_cell == cell or event.execution in self.routes:
            self.routes[event.execution] = event.to_cell

    def cut(self, event: ev.CallCut, now: float) -> Iterator[Effect]:
        """A call of ours."""
        if event.lease:
            self.leases[event.rid] = Held(event.execution, event.lease)
            yield Wake(now + event.hold_s, TIMER + event.rid)

    def adopted(self, event: ev.CallAdopted, incarnation: str) -> Iterator[Effect]:
        held = self.leases.get(event.rid)
        if held is not None and held.lease == event.lease:
            yield from self._release(event.rid, incarnation, OUTCOMES.get(event.outcome, "failed"))

    def timer(self, key: str, incarnation: str) -> Iterator[Effect]:
        rid = key.removeprefix(TIMER)
        if key.startswith(TIMER) and rid in self.leases:
            yield from self._release(rid, incarnation, "expired")

    def _release(self, rid: str, incarnation: str, outcome: str) -> Iterator[Effect]:
        held = self.leases[rid]
        if not held.releasing:
            held.releasing = True
            named = {"rid": rid, "execution": held.execution, "lease": held.lease}
            yield Do(do.Release(incarnation=incarnation, outcome=outcome, **named))

    def released(self, event: ev.CallReleased) -> None:
        self.leases.pop(event.rid, None)

    def lost(self, cell: int, incarnation: str) -> Iterator[Effect]:
        """The engine that held the pages is not to be relied on any more."""
        for rid, held in self.leases.items():
            yield Publish(
                ev.CallReleased(
                    rid=rid,
                    execution=held.execution,
                    cell=cell,
                    incarnation=incarnation,
                    lease=held.lease,
                    outcome="lost",
                )
            )
        self.leases, self.routes = {}, {}


def arrives(event: ev.CallCut, cell: int, incarnation: str, role: Role, source_lives: bool) -> Effect:
    """A call that was cut elsewhere goes on in this cell."""
    if event.lease and role is Role.ROLLOUT and source_lives:
        return Do(do.Adopt(incarnation=incarnation, cut=event))
    detail = ""
    if event.lease:
        detail = f"cell {cell} is {role}" if source_lives else f"cell {event.from_cell} was lost"
    return Publish(answer(event, cell, incarnation, "recompute", detail=detail))


def answer(
    cut: ev.CallCut,
    cell: int,
    incarnation: str,
    outcome: str,
    *,
    tokens: int = 0,
    seconds: float = 0.0,
    extra_key: str = "",
    detail: str = "",
) -> ev.CallAdopted:
    return ev.CallAdopted(
        rid=cut.rid,
        call=cut.call,
        execution=cut.execution,
        cell=cell,
        incarnation=incarnation,
        lease=cut.lease,
        outcome=outcome,
        tokens_from_pages=tokens,
        seconds=seconds,
        extra_key=extra_key,
        detail=detail,
    )
