"""Schedules that only the ablation needs, built on the live policies. None of them is offered to the live system."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.policy import Elastic, Membership
from services.scheduler.state import Settings, State


@dataclass(frozen=True)
class Coarse:
    """Coarse switching: cells [0, pool) leave together as soon as the standalone cells hold the
    waterlevel and the supply has held; they come back together at the burst's end."""

    settings: Settings
    pool: int
    spread: bool = False
    takes_notes: bool = False

    @property
    def _fine(self) -> Elastic:
        return Elastic(self.settings)

    def groups_to_dispatch(self, s: State) -> int:
        return self._fine.groups_to_dispatch(s)

    def supplied(self, s: State) -> bool:
        return self._fine.supplied(s)

    def training_cells(self, s: State, now: float) -> Membership:
        if s.training == self.pool or s.supply_since is None:
            return Membership(s.training)
        standalone = sum(cell.share.capacity for cell in s.cells[self.pool :])
        if s.waterlevel > standalone:
            return Membership(s.training)
        held_at = s.supply_since + self.settings.supply_hold_s
        return Membership(self.pool) if now >= held_at else Membership(s.training, ask_at=held_at)

    def burst_is_over(self, s: State) -> bool:
        return self._fine.burst_is_over(s)

    def cells_that_stay(self, s: State) -> int:
        return 0
