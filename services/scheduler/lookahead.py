"""Beyond the paper's rule: bursts planned by forecasts from the durations observed so far.

What it decides at each burst's start: mu and the depth of the dispatch, among all schedules with the run's mean
staleness, by playing the next steps forward (forecast.py). It keeps an account of the staleness spent, so that what a
run's end leaves over (the last burst dispatches nothing ahead) is used before. A cell leaves rollout as soon as one
group is there for it, and trained cells stay through a publication while the others hold the next dispatch.

Invariant: the guarantees are Elastic's. No cell leaves while the others' capacity is below the waterlevel, training cells
are a growing prefix, and the mean staleness planned for the whole run never exceeds (mu - 1)/2 + phi of the run file.
Without enough observations the run file's own mu and phi are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.scheduler.forecast import forecast, outlook
from services.scheduler.notes import Notes, Plan
from services.scheduler.policy import Membership, switched
from services.scheduler.state import Settings, State, supply

GAIN = 0.03  # another mu must be better by this, in a forecast, to be taken
WARM, STEPS = 6, 18  # a forecast measures steps (WARM, STEPS]: whole bursts of 1, 2, 3, 4, 6 and 12


@dataclass(frozen=True)
class Lookahead:
    settings: Settings
    spread: bool = False
    takes_notes: bool = True

    # ------------------------------------------------------------------------------------------------ the interface

    def groups_to_dispatch(self, s: State) -> int:
        if s.burst_open:
            return 0
        return max(0, self._plan(s, s.burst).outstanding - s.outstanding)

    def supplied(self, s: State) -> bool:
        b = self.settings.groups_per_batch
        batches = min(self._mu(s) - s.burst_batches, self.settings.steps - s.version)
        return supply(s, batches, b) >= min(s.training + 1, b, s.outstanding)

    def training_cells(self, s: State, now: float) -> Membership:
        n = s.training
        stay = Membership(n)
        if n == len(s.cells) or s.supply_since is None:
            return stay
        if n > 0 and (s.batch is None or s.batch.reduce or not switched(s.cells[n - 1])):
            return stay
        cell = s.cells[n]
        if not (cell.share.capacity and cell.trainer_ready) or s.waterlevel > s.capacity - cell.share.capacity:
            return stay
        return Membership(n + 1)

    def may_open_batch(self, s: State) -> bool:
        return True

    def burst_is_over(self, s: State) -> bool:
        return s.burst_batches >= self._mu(s) or s.version >= self.settings.steps

    def cells_that_stay(self, s: State) -> int:
        """As many as have work waiting, while the others hold what is outstanding and the next dispatch."""
        dispatch = max(0, self._plan(s, s.burst + 1).outstanding - s.outstanding)
        spare = s.live_capacity - s.waterlevel - dispatch * self.settings.executions_per_group
        n = 0
        while n < min(s.training, len(s.ready)) and s.cells[n].share.live_capacity <= spare:
            spare -= s.cells[n].share.live_capacity
            n += 1
        return n

    # ---------------------------------------------------------------------------------------------------- planning

    def _mu(self, s: State) -> int:
        notes = s.notes
        return notes.plan.mu if notes is not None and notes.plan.burst == s.burst else self.settings.mu

    def _plan(self, s: State, burst: int) -> Plan:
        """The plan of `burst`, made when it is first asked for: at the boundary before it."""
        notes = s.notes
        assert notes is not None
        if notes.plan.burst != burst:
            notes.plan = self._make_plan(s, notes, burst)
        return notes.plan

    def _make_plan(self, s: State, notes: Notes, burst: int) -> Plan:
        left = self.settings.steps - s.version
        mu, seconds = self._best_mu(s, notes, burst, left)
        b = self.settings.groups_per_batch
        out = min(math.floor((mu + self._phi(s, notes, mu)) * b + 0.5), left * b)
        return Plan(burst=burst, mu=max(1, min(mu, left)), outstanding=out, forecast_s=seconds)

    def _best_mu(self, s: State, notes: Notes, burst: int, left: int) -> tuple[int, float]:
        own = notes.plan.mu if notes.plan.burst and left > notes.plan.mu else self.settings.mu
        if len(notes.finished) < max(8, self.settings.groups_per_batch // 2) or left <= 1:
            return own, 0.0
        steps = min(STEPS, left)
        warm = WARM if left >= STEPS else 0
        now = outlook(self.settings, s, notes, f"{self.settings.seed}/lookahead/{burst}")
        times: dict[int, float] = {}
        for mu in range(1, math.floor(2 * self._target + 1) + 1):
            commits = forecast(now, mu, self._phi(s, notes, mu), steps, left)
            times[mu] = (commits[-1] - (commits[warm - 1] if warm else 0.0)) / (steps - warm)
        best = min(times, key=lambda mu: (times[mu], mu))
        current = times.get(own, math.inf)
        return (best, times[best]) if times[best] < current * (1 - GAIN) else (own, current)

    @property
    def _target(self) -> float:
        return (self.settings.mu - 1) / 2 + self.settings.phi

    def _phi(self, s: State, notes: Notes, mu: int) -> float:
        """Extra dispatch, in batches, that spends exactly the staleness which is left, if all bursts to come have mu
        steps. The last one dispatches nothing ahead, whatever phi is."""
        left = self.settings.steps - s.version
        last = left % mu or mu
        if left <= last:
            return 0.0
        allowed = self._target * self.settings.steps - notes.stale_groups / self.settings.groups_per_batch
        bursts = (left - last) * (mu - 1) / 2 + last * (last - 1) / 2
        steady = max(0.0, self._target - (mu - 1) / 2)
        return max(0.0, min((allowed - bursts) / (left - last), steady + 0.25))
