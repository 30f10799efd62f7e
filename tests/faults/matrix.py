"""What can be lost when: steps of a change of role x victims x signals, as data.

A step begins with an event of the stream (or `after_s` later) and ends with another; a strike counts as a hit only
between the two, by the times at which the stream stored them. `Switch` says which change of role it was.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared import events as ev
from shared.events import Event


@dataclass(frozen=True)
class Switch:
    """A cell that leaves rollout (`source`), and where its calls go (-1: nowhere)."""

    source: int
    destination: int = -1
    rid: str = ""
    batch: int = 0


class Routes:
    """Where the executions of a leaving cell went, as far as the stream was read."""

    def __init__(self) -> None:
        self.destination: dict[int, int] = {}
        self.cut_at: dict[str, int] = {}  # request id -> cell

    def handle(self, event: Event) -> None:
        if isinstance(event, ev.CallCut):
            self.cut_at[event.rid] = event.from_cell
        elif isinstance(event, ev.ExecutionMoved) and event.reason.endswith("goes to training"):
            self.destination[event.from_cell] = event.to_cell
        elif isinstance(event, ev.CellRoleChanged) and event.role in ("rollout", "offline"):
            self.destination.pop(event.cell, None)

    def switch(self, source: int, **more: Any) -> Switch | None:
        """None if the cell had no execution that could have a live call."""
        to = self.destination.get(source)
        return None if to is None else Switch(source, to, **more)


@dataclass(frozen=True)
class Step:
    name: str
    part: str  # "hand-over" or "join"
    begins: Callable[[Any, Routes], Switch | None]
    ends: Callable[[Any, Switch], bool]
    after_s: float = 0.0


def _drained(e: Event, s: Switch) -> bool:
    return isinstance(e, ev.CellDrained) and e.cell == s.source


def _cut_or_drained(e: Event, s: Switch) -> bool:
    return _drained(e, s) or (isinstance(e, ev.CallCut) and e.from_cell == s.source)


def _adopted(e: Event, s: Switch) -> bool:
    return isinstance(e, ev.CallAdopted) and e.rid == s.rid


def _recorded(e: Event, s: Switch) -> bool:
    """The call that moved has come to its end."""
    return isinstance(e, ev.ModelCallRecorded) and s.rid.startswith(f"{e.call}-")


def _joined(e: Event, s: Switch) -> bool:
    return isinstance(e, ev.CellJoinedBatch) and e.cell == s.source


def _reduces(e: Event, s: Switch) -> bool:
    return isinstance(e, ev.BatchReduceOrdered) and (not s.batch or e.batch == s.batch)


def _committed(e: Event, s: Switch) -> bool:
    return isinstance(e, ev.BatchCommitted) and (not s.batch or e.batch == s.batch)


def _refitted(e: Event, s: Switch) -> bool:
    return isinstance(e, ev.CellRefitted) and e.cell == s.source


def _moved(e: Any, r: Routes) -> Switch | None:
    leaves = isinstance(e, ev.ExecutionMoved) and e.reason.endswith("goes to training")
    return r.switch(e.from_cell) if leaves else None


def _ordered(e: Any, r: Routes) -> Switch | None:
    return r.switch(e.cell) if isinstance(e, ev.CellRoleOrdered) and e.role == "training" else None


def _draining(e: Any, r: Routes) -> Switch | None:
    return r.switch(e.cell) if isinstance(e, ev.CellRoleChanged) and e.role == "draining" else None


def _cut(e: Any, r: Routes) -> Switch | None:
    return Switch(e.from_cell, e.to_cell, e.rid) if isinstance(e, ev.CallCut) and e.lease and e.to_cell >= 0 else None


def _with_pages(e: Any, r: Routes) -> Switch | None:
    told = isinstance(e, ev.CallAdopted) and e.outcome == "pages"
    return Switch(r.cut_at[e.rid], e.cell, e.rid) if told else None


def _released(e: Any, r: Routes) -> Switch | None:
    told = isinstance(e, ev.CallReleased) and e.outcome == "adopted"
    return Switch(e.cell, r.destination.get(e.cell, -1), e.rid) if told else None


def _drained_with_calls(e: Any, r: Routes) -> Switch | None:
    return r.switch(e.cell) if isinstance(e, ev.CellDrained) and e.calls else None


def _joining(e: Any, r: Routes) -> Switch | None:
    satellite = isinstance(e, ev.CellRoleChanged) and e.role == "joining" and e.cell > 0
    return Switch(e.cell) if satellite else None


def _satellite_joined(e: Any, r: Routes) -> Switch | None:
    return Switch(e.cell, batch=e.batch) if isinstance(e, ev.CellJoinedBatch) and e.cell > 0 else None


def _satellite_trained(e: Any, r: Routes) -> Switch | None:
    return Switch(e.cell, batch=e.batch) if isinstance(e, ev.MicroStepTrained) and e.cell > 0 else None


def _reduce_of_several(e: Any, r: Routes) -> Switch | None:
    several = isinstance(e, ev.BatchReduceOrdered) and len(e.cells) > 1
    return Switch(e.cells[-1], batch=e.batch) if several else None


def _commit_of_several(e: Any, r: Routes) -> Switch | None:
    return Switch(e.cells[-1], batch=e.batch) if isinstance(e, ev.BatchCommitted) and len(e.cells) > 1 else None


def _returning(e: Any, r: Routes) -> Switch | None:
    satellite = isinstance(e, ev.CellRoleChanged) and e.role == "returning" and e.cell > 0
    return Switch(e.cell) if satellite else None


STEPS = {
    step.name: step
    for step in (
        Step("moved", "hand-over", _moved, _drained),
        Step("ordered", "hand-over", _ordered, _drained),
        Step("cutting", "hand-over", _draining, _cut_or_drained, after_s=0.03),
        Step("cut", "hand-over", _cut, _adopted),
        Step("adopting", "hand-over", _cut, _adopted, after_s=0.04),
        Step("adopted", "hand-over", _with_pages, _recorded),
        Step("released", "hand-over", _released, _recorded),
        Step("drained", "hand-over", _drained_with_calls, _reduces),
        Step("joining", "join", _joining, _joined),
        Step("pulling", "join", _joining, _joined, after_s=0.015),
        Step("joined", "join", _satellite_joined, _reduces),
        Step("trained", "join", _satellite_trained, _reduces),
        Step("reducing", "join", _reduce_of_several, _committed),
        Step("committed", "join", _commit_of_several, _refitted),
        Step("returning", "join", _returning, _refitted),
    )
}

VICTIMS: dict[str, Callable[[Switch], str]] = {
    "source-agent": lambda s: f"cell-agent-{s.source}",
    "source-engine": lambda s: f"engine-{s.source}",
    "source-memory": lambda s: f"memory-{s.source}",
    "source-trainer": lambda s: f"trainer-{s.source}",
    "destination-agent": lambda s: f"cell-agent-{s.destination}",
    "destination-engine": lambda s: f"engine-{s.destination}",
    "core-agent": lambda s: "cell-agent-0",
    "core-trainer": lambda s: "trainer-0",
    "proxy": lambda s: "proxy",
    "scheduler": lambda s: "scheduler",
    "trajectory": lambda s: "trajectory",
    "nats-server": lambda s: "nats-server",
}
STOP_S = 6.0  # "pause": longer than the pulse and than a hand-over may wait, shorter than the watch over engines

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}


@dataclass(frozen=True)
class Case:
    """`signal`: kill, stop (for good: somebody must notice) or pause (SIGCONT after STOP_S)."""

    step: str
    victim: str
    signal: str = "kill"

    @property
    def name(self) -> str:
        return f"{self.step}/{self.victim}/{self.signal}"

    @classmethod
    def of(cls, name: str) -> Case:
        case = cls(*name.split("/"))
        if case.step not in STEPS or case.victim not in VICTIMS or case.signal not in SIGNALS:
            raise ValueError(f"no case {name!r}: STEP/VICTIM/SIGNAL of {[*STEPS]}, {[*VICTIMS]}, {[*SIGNALS]}")
        return case


def matrix() -> list[Case]:
    """Every case, in an order in which neighbours differ."""
    everybody = ("proxy", "scheduler", "core-trainer", "nats-server")
    hand_over = ("source-agent", "source-engine", "destination-agent", "destination-engine", *everybody)
    join = ("source-agent", "source-engine", "source-trainer", "core-agent", *everybody)
    cases = [
        Case(step.name, victim) for step in STEPS.values() for victim in (hand_over if step.part[0] == "h" else join)
    ]
    for how in ("stop", "pause"):
        cases += [Case(s, v, how) for s in ("cutting", "cut", "adopting") for v in ("source-memory", "source-engine")]
        cases += [Case(s, "destination-engine", how) for s in ("cut", "adopting", "adopted")]
        cases += [Case(s, "core-trainer", how) for s in ("joining", "pulling", "trained", "reducing", "returning")]
        cases += [Case(s, "source-trainer", how) for s in ("trained", "reducing")]
    return cases
