"""Calls that are cut at their engine because its cell leaves rollout: what the stream says of them, and waiting for it.

Invariant: `Cuts` is a pure function of the events, and forgets a call with its record and an execution with its end. A
cut call waits only while its pages may still come to where it goes, and never longer than the limits.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from services.proxy.watch import Watch
from shared.events import (
    CallAdopted,
    CallCut,
    Event,
    ExecutionAssessed,
    ExecutionFinished,
    ExecutionMoved,
    ModelCallRecorded,
)
from shared.ids import call_of
from shared.telemetry import Telemetry, Trail

TOLD_S = 2.0  # after a call was cut, its cell's word on that may take so long to come through the stream


class CutCall(msgspec.Struct):
    """`settled` when nothing more is to be waited for."""

    to_cell: int
    settled: bool
    extra_key: str = ""


class Cuts(msgspec.Struct):
    calls: dict[str, dict[str, CutCall]] = {}  # execution -> request id at the engine -> its move

    def handle(self, event: Event) -> None:
        match event:
            case CallCut():
                cut = CutCall(event.to_cell, settled=not event.lease)
                self.calls.setdefault(event.execution, {})[event.rid] = cut
            case CallAdopted():
                if event.rid in self.calls.get(event.execution, {}):
                    adopted = CutCall(event.cell, settled=True, extra_key=event.extra_key)
                    self.calls[event.execution][event.rid] = adopted
            case ExecutionMoved():
                for cut in self.calls.get(event.execution, {}).values():
                    cut.settled = cut.settled or cut.to_cell != event.to_cell  # its pages are not needed there
            case ModelCallRecorded():
                self._recorded(event)
            case ExecutionFinished() | ExecutionAssessed():
                self.calls.pop(event.execution, None)

    def _recorded(self, event: ModelCallRecorded) -> None:
        known = self.calls.get(event.execution)
        if known is None:
            return
        left = {rid: cut for rid, cut in known.items() if (call_of(rid) or ("",))[0] != event.call}
        if left:
            self.calls[event.execution] = left
        else:
            del self.calls[event.execution]

    def find(self, execution: str, rid: str) -> CutCall | None:
        return self.calls.get(execution, {}).get(rid)


class Handover(NamedTuple):
    """A cut call may go on: its pages may be at `cell`, found with `extra_key`."""

    cell: int
    extra_key: str


async def until_settled(watch: Watch, cuts: Cuts, execution: str, rid: str, pages_s: float) -> Handover | None:
    """Wait until a request that its engine cut may go on elsewhere: at once if no pages follow it, else until they are
    there, for `pages_s` at most. None if nobody told that it was cut."""
    cut = await watch.until(lambda: cuts.find(execution, rid), TOLD_S)
    if cut is None:
        return None

    def settled() -> CutCall | None:
        now = cuts.find(execution, rid)
        return CutCall(-1, settled=True) if now is None else now if now.settled else None

    done = await watch.until(settled, pages_s) or cut
    return Handover(done.to_cell, done.extra_key)


class Continued:
    """The proxy's part in the trace of a change of role: one span a moved call, from the last word of one engine to the
    first token of the next. `trail`: by request id, the headers of the last message about its move."""

    def __init__(self, telemetry: Telemetry, trail: Trail) -> None:
        self._telemetry, self._trail = telemetry, trail
        self._rid, self._since = "", 0.0

    def cut(self, rid: str) -> None:
        self._rid, self._since = rid, time.time()

    def token(self) -> None:
        """One came."""
        if self._rid:
            rid, self._rid = self._rid, ""
            self._telemetry.past("continue call", self._since, self._trail.get(rid), {"rid": rid})
