"""The decisions of a mode, each a pure function of the state: how much to dispatch, which cells train, when a burst
is over, who stays in training after it.

Invariant: a policy changes nothing, and whatever it answers the core keeps the rules common to all modes: training
cells are a prefix of the cell list without the standalone engines, no more groups are dispatched than the run's steps
consume, batches commit in order. A policy must let every burst end: with all outstanding executions finished,
`training_cells` is at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.state import TRAINING, Cell, Settings, State, supply


@dataclass(frozen=True)
class Membership:
    """Cells [0, cells) belong in training now. `ask_at`: the answer may differ at that time without any event."""

    cells: int
    ask_at: float | None = None


class Policy(Protocol):
    """One mode. Every question is asked after every event while training goes on, so each must cost O(1)."""

    @property
    def spread(self) -> bool:
        """Place on the emptiest cell (True) or on the one that leaves rollout last (False)."""
        ...

    @property
    def takes_notes(self) -> bool:
        """Whether the core keeps `State.notes` for it."""
        ...

    def groups_to_dispatch(self, s: State) -> int: ...

    def supplied(self, s: State) -> bool:
        """Is there work enough for one more cell? The core keeps how long this has been so: `s.supply_since`."""
        ...

    def training_cells(self, s: State, now: float) -> Membership: ...

    def burst_is_over(self, s: State) -> bool: ...

    def cells_that_stay(self, s: State) -> int:
        """At a burst's end, before the next dispatch: cells [0, n) go on training."""
        ...


# ------------------------------------------------------------------------------------------------ rules of all modes


def depth(settings: Settings) -> int:
    """Q_b: groups outstanding at a burst boundary, (phi + mu) * B, to the nearest whole group (paper)."""
    return math.floor((settings.phi + settings.mu) * settings.groups_per_batch + 0.5)


def boundary_dispatch(settings: Settings, s: State) -> int:
    """Groups missing to the depth at the boundary now passed; never more than the remaining steps consume."""
    if s.burst_open:
        return 0
    return next_dispatch(settings, s)


def next_dispatch(settings: Settings, s: State) -> int:
    total = settings.steps * settings.groups_per_batch
    return max(0, min(depth(settings) - s.outstanding, total - s.groups_dispatched))


def burst_length_reached(settings: Settings, s: State) -> bool:
    return s.burst_batches >= settings.mu or s.version >= settings.steps


def switched(cell: Cell) -> bool:
    """The cell's switch to training is over: it is there, or it died on the way (and follows when it is back)."""
    return not cell.incarnation or cell.role == TRAINING or cell.joined is not None


# -------------------------------------------------------------------------------------------------------- the modes


@dataclass(frozen=True)
class Elastic:
    """Paper: one cell at a time, core first, leaves rollout when the others can hold the waterlevel and the supply
    of untrained groups has held for a while; all come back at the burst's end, the core unless it can go right on."""

    settings: Settings
    spread: bool = False
    takes_notes: bool = False

    def groups_to_dispatch(self, s: State) -> int:
        return boundary_dispatch(self.settings, s)

    def supplied(self, s: State) -> bool:
        b = self.settings.groups_per_batch
        batches = min(self.settings.mu - s.burst_batches, self.settings.steps - s.version)
        # Capped, so that the last batches of a run, or a fraction above 1, cannot ask for more than there will be.
        need = min(math.ceil(self.settings.supply_fraction * b), b, s.outstanding)
        return supply(s, batches, b) >= need

    def training_cells(self, s: State, now: float) -> Membership:
        n = s.training
        stay = Membership(n)
        if n == self.settings.cells or s.supply_since is None:
            return stay
        if n > 0 and (s.batch is None or s.batch.reduce or not switched(s.cells[n - 1])):
            return stay
        cell = s.cells[n]
        if not (cell.share.capacity and cell.trainer_ready):
            return stay
        if s.waterlevel > s.capacity - cell.share.capacity:
            return stay
        held_at = s.supply_since + self.settings.supply_hold_s
        return Membership(n + 1) if now >= held_at else Membership(n, ask_at=held_at)

    def burst_is_over(self, s: State) -> bool:
        return burst_length_reached(self.settings, s)

    def cells_that_stay(self, s: State) -> int:
        executions = s.waterlevel + next_dispatch(self.settings, s) * self.settings.executions_per_group
        others = s.live_capacity - s.cells[0].share.live_capacity
        return int(len(s.ready) >= self.settings.groups_per_batch and executions <= others)


@dataclass(frozen=True)
class Async:
    """A fixed split: cells [0, n) train, the others roll out and are refitted after every mu batches."""

    settings: Settings
    spread: bool = True
    takes_notes: bool = False

    def groups_to_dispatch(self, s: State) -> int:
        return boundary_dispatch(self.settings, s)

    def supplied(self, s: State) -> bool:
        return True

    def training_cells(self, s: State, now: float) -> Membership:
        return Membership(self.settings.async_training_cells)

    def burst_is_over(self, s: State) -> bool:
        return burst_length_reached(self.settings, s)

    def cells_that_stay(self, s: State) -> int:
        return self.settings.async_training_cells


@dataclass(frozen=True)
class Colocate:
    """All cells roll out until everything outstanding is finished, or the standalone engines hold what is left; then
    they train mu batches together, and come back."""

    settings: Settings
    spread: bool = True
    takes_notes: bool = False

    def groups_to_dispatch(self, s: State) -> int:
        return boundary_dispatch(self.settings, s)

    def supplied(self, s: State) -> bool:
        return True

    def training_cells(self, s: State, now: float) -> Membership:
        if s.training == 0 and s.waterlevel > s.pool:
            return Membership(0)
        return Membership(self.settings.cells)

    def burst_is_over(self, s: State) -> bool:
        return burst_length_reached(self.settings, s)

    def cells_that_stay(self, s: State) -> int:
        return 0


def policy_for(settings: Settings) -> Policy:
    from services.scheduler.lookahead import Lookahead  # it builds on this module

    modes: dict[str, Callable[[Settings], Policy]] = {
        "elastic": Elastic,
        "async": Async,
        "colocate": Colocate,
        "lookahead": Lookahead,
    }
    return modes[settings.mode](settings)
