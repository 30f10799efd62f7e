"""Beyond the paper's rule: bursts planned by forecasts from the durations observed so far.

What it decides at each burst's start: mu, the depth of the dispatch, and whether the burst's groups go out at once or
bit by bit, as the cells that are not kept for training have places for them (`Plan.keep`); among all schedules with the
run's mean staleness, by playing the next steps forward (forecast.py). It keeps an account of the staleness spent, so
that what a run's end leaves over (the last burst dispatches nothing ahead) is used before. A cell leaves rollout as
soon as one group is there for it, and trained cells stay through a publication while the others hold the next dispatch.

Invariant: the guarantees are Elastic's. No cell leaves while the others' capacity is below the waterlevel, training
cells are a growing prefix, and the mean staleness planned for the whole run never exceeds (mu - 1)/2 + phi of the run
file. Without enough observations the run file's own mu is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.scheduler.forecast import Outlook, forecast, outlook
from services.scheduler.notes import Notes, Plan
from services.scheduler.policy import Membership, depth, switched
from services.scheduler.state import Settings, State, supply

GAIN = 0.03  # another mu must be better by this, and in every draw of a forecast, to be taken
LONGEST = 60  # steps: a run that is nearer to its end is forecast to the end, with its last, shorter burst
WARM, STEPS = 6, 18  # else a forecast measures steps (WARM, STEPS]: whole bursts of 1, 2, 3, 4, 6 and 12


@dataclass(frozen=True)
class Lookahead:
    settings: Settings
    spread: bool = False
    takes_notes: bool = True

    # ------------------------------------------------------------------------------------------------ the interface

    def groups_to_dispatch(self, s: State) -> int:
        plan = self._plan(s, s.burst)
        owed = plan.last - s.groups_dispatched
        return min(owed, self._fitting(s, plan)) if plan.keep and owed > 0 else max(0, owed)

    def supplied(self, s: State) -> bool:
        b = self.settings.groups_per_batch
        batches = min(self._mu(s) - s.burst_batches, self.settings.steps - s.version)
        return supply(s, batches, b) >= min(s.training + 1, b, s.outstanding)

    def training_cells(self, s: State, now: float) -> Membership:
        n = s.training
        stay = Membership(n)
        if n == self.settings.cells or s.supply_since is None:
            return stay
        if n > 0 and (s.batch is None or s.batch.reduce or not switched(s.cells[n - 1])):
            return stay
        cell = s.cells[n]
        if not (cell.share.capacity and cell.trainer_ready) or s.waterlevel > s.capacity - cell.share.capacity:
            return stay
        return Membership(n + 1)

    def burst_is_over(self, s: State) -> bool:
        return s.burst_batches >= self._mu(s) or s.version >= self.settings.steps

    def cells_that_stay(self, s: State) -> int:
        """As many as have work waiting, while the others hold what is outstanding and the next dispatch. A cell that
        died meanwhile, and those behind it, come back to rollout as at any burst's end."""
        there = 0
        while there < s.training and s.cells[there].ordered:
            there += 1
        plan = self._plan(s, s.burst + 1)
        if plan.keep:
            free = max(0, s.live_capacity - s.waterlevel) // max(1, self._places(s))
            return min(there, self._kept(s, plan), free)
        dispatch = max(0, plan.last - s.groups_dispatched)
        spare = s.live_capacity - s.waterlevel - dispatch * self.settings.executions_per_group
        n = 0
        while n < min(there, len(s.ready)) and s.cells[n].share.live_capacity <= spare:
            spare -= s.cells[n].share.live_capacity
            n += 1
        return n

    # ---------------------------------------------------------------------------------------------------- planning

    def _mu(self, s: State) -> int:
        notes = s.notes
        return notes.plan.mu if notes is not None and notes.plan.burst == s.burst else self.settings.mu

    def _places(self, s: State) -> int:
        """Of one cell: all are alike."""
        return s.cells[0].capacity

    def _kept(self, s: State, plan: Plan) -> int:
        """One cell more while half a batch is ready beyond the open one."""
        backlog = 2 * len(s.ready) >= self.settings.groups_per_batch
        return plan.keep + int(backlog and plan.keep < self._most_kept(s))

    def _most_kept(self, s: State) -> int:
        """All that may train, if one engine is left for rollout."""
        return min(self.settings.cells, len(s.cells) - 1)

    def _fitting(self, s: State, plan: Plan) -> int:
        """Groups for which the cells that are not kept for training have places. At least one when nothing runs, or a
        group that is larger than all places would never be dispatched."""
        free = s.live_capacity - self._kept(s, plan) * self._places(s) - s.waterlevel
        return max(free // self.settings.executions_per_group, int(s.waterlevel == 0))

    def _plan(self, s: State, burst: int) -> Plan:
        """The plan of `burst`, made when it is first asked for: at the boundary before it."""
        notes = s.notes
        assert notes is not None
        if notes.plan.burst != burst:
            notes.plan = self._make_plan(s, notes, burst)
        return notes.plan

    def _make_plan(self, s: State, notes: Notes, burst: int) -> Plan:
        left = self.settings.steps - s.version
        mu, keep, seconds = self._best(s, notes, burst, left)
        b = self.settings.groups_per_batch
        out = min(math.floor((mu + self._phi(s, notes, mu)) * b + 0.5), left * b)
        last = s.groups_dispatched + max(0, out - s.outstanding)
        return Plan(burst=burst, mu=max(1, min(mu, left)), last=last, keep=keep, forecast_s=seconds)

    def _keeps(self, s: State, notes: Notes) -> list[int]:
        """Numbers of cells to leave free for training: those about which training and rollout balance."""
        engines, most, b = len(s.cells), self._most_kept(s), self.settings.groups_per_batch
        training = notes.trained_s / max(1, notes.batches)
        lives = [x for group in notes.finished for x in group]
        rollout = b * self.settings.executions_per_group * sum(lives) / max(1, len(lives)) / max(1, self._places(s))
        share = engines * training / max(1e-9, training + rollout)
        return sorted({k for k in (math.floor(share), math.ceil(share)) if 0 < k <= most})

    def _best(self, s: State, notes: Notes, burst: int, left: int) -> tuple[int, int, float]:
        """Steps of the burst, cells left free for training, and the forecast seconds per step (0: no forecast was
        possible)."""
        allowed = [mu for mu in range(1, math.floor(2 * self._target + 1) + 1) if self._spend(s, notes, mu) >= 0.0]
        own, keep = notes.plan.mu or self.settings.mu, notes.plan.keep
        if left <= notes.plan.mu:
            own = self.settings.mu
        if own not in allowed:
            own = max((mu for mu in allowed if mu < own), default=1)
        # The first groups to be ready are the short ones: what is seen of the first bursts is not the whole truth.
        enough = notes.seen >= 2 * depth(self.settings) and len(notes.finished) >= 8
        if not enough or left <= 1 or s.live_capacity == 0:
            return own, keep, 0.0
        outlooks = [
            outlook(self.settings, s, notes, f"{self.settings.seed}/lookahead/{burst}/{draw}")
            for draw in range(self._draws)
        ]
        times: dict[tuple[int, int], list[float]] = {}

        def judge(mu: int, keep: int) -> None:
            if (mu, keep) not in times:
                times[mu, keep] = [self._seconds(now, s, notes, mu, keep, left) for now in outlooks]

        def total(schedule: tuple[int, int]) -> tuple[float, tuple[int, int]]:
            return sum(times[schedule]), schedule

        for mu in (own, *allowed):
            judge(mu, 0)
        for mu in (own, min(times, key=total)[0]):
            for cells in self._keeps(s, notes):
                judge(mu, cells)
        judge(own, keep)
        best, mine = min(times, key=total), (own, keep)
        sure = all(a < b for a, b in zip(times[best], times[mine], strict=True))
        if not sure or sum(times[best]) >= sum(times[mine]) * (1 - GAIN):
            best = mine
        return *best, sum(times[best]) / len(outlooks)

    def _seconds(self, now: Outlook, s: State, notes: Notes, mu: int, keep: int, left: int) -> float:
        """Forecast seconds per step."""
        steps, warm = (left, 0) if left <= LONGEST else (STEPS, WARM)
        commits = forecast(now, mu, self._phi(s, notes, mu), steps, left, keep * now.join)
        return (commits[-1] - (commits[warm - 1] if warm else 0.0)) / (steps - warm)

    @property
    def _draws(self) -> int:
        """The fewer executions a forecast has, the more it is left to chance."""
        return max(1, min(5, 3072 // max(1, depth(self.settings) * self.settings.executions_per_group)))

    @property
    def _target(self) -> float:
        return (self.settings.mu - 1) / 2 + self.settings.phi

    def _phi(self, s: State, notes: Notes, mu: int) -> float:
        """Extra dispatch, in batches: what the account allows, at most a quarter batch above the steady value."""
        steady = max(0.0, self._target - (mu - 1) / 2)
        return max(0.0, min(self._spend(s, notes, mu), steady + 0.25))

    def _spend(self, s: State, notes: Notes, mu: int) -> float:
        """The phi that spends exactly the staleness which is left, if all bursts to come have mu steps; below 0: even
        without extra dispatch it is too much. The last burst dispatches nothing ahead, whatever phi is."""
        left = self.settings.steps - s.version
        last = left % mu or mu
        allowed = self._target * self.settings.steps - notes.stale_groups / self.settings.groups_per_batch
        spare = allowed - (left - last) * (mu - 1) / 2 - last * (last - 1) / 2 + 1e-9
        if left <= last:
            return 0.0 if spare >= 0 else -1.0
        return spare / (left - last)
