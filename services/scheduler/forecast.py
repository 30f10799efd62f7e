"""A quick look ahead: how fast would a schedule go from here, if executions last as they did so far?

Invariant: pure and bounded. Executions are drawn from the durations in the notes; those that run are given a residual
life among the recorded ones that lasted longer (a survival estimate). Above `MOST` outstanding executions everything is
scaled down alike, so a forecast costs the same for 10,000 cells as for 10.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.scheduler.notes import Notes
from services.scheduler.state import Settings, State

MOST = 4096  # executions outstanding in a forecast


@dataclass(frozen=True)
class Outlook:
    """The present, as far as a forecast needs it. Seconds; `groups`: residual lives of what is outstanding."""

    batch: int  # B
    executions: int  # N
    places: float
    per_cell: float  # places of one cell or standalone engine
    cells: float  # that may train
    group_s: float  # training, cell-seconds per group
    commit_s: float
    to_training_s: float  # cells leave rollout one after the other, each taking so long
    pause_s: float  # at a burst's end: the last group's assessment, and refits before anything is placed
    join: float  # cells that join at once: 1, scaled
    groups: tuple[tuple[float, ...], ...]
    fresh: tuple[tuple[float, ...], ...]  # groups to be dispatched next, in order, used again and again


def outlook(settings: Settings, s: State, notes: Notes, seed: str) -> Outlook:
    """Draw the residual lives of everything outstanding and the lives of what comes next."""
    rng = random.Random(seed)
    n, b = settings.executions_per_group, settings.groups_per_batch
    scale = max(1.0, (settings.mu + settings.phi) * b * n / MOST)
    lives = sorted(x for group in notes.finished for x in group)
    known = [tuple(group) for group in notes.finished]
    rest: dict[str, list[float]] = {name: [] for name in s.ready}
    ages: dict[str, list[float]] = {}
    for execution in s.executions.values():
        if not execution.evaluation:
            rest.setdefault(execution.group, [])
            age = notes.now - execution.started_at if execution.started else 0.0
            ages.setdefault(execution.group, []).append(age)
    keep = max(1, round(len(rest) / scale))
    for name in list(rest)[:keep]:
        whole = [_longer(lives, age, rng) for age in ages.get(name, [])]
        rest[name] = [x - age for x, age in zip(whole, ages.get(name, []), strict=True)]
        if name in notes.open or whole:
            known.append((*notes.open.get(name, ()), *whole))
    count = 4 * max(len(known), 2 * b)
    fresh = []
    for _ in range(min(count, 512)):
        group = known[rng.randrange(len(known))]
        fresh.append(group if len(group) == n else tuple(rng.choice(group) for _ in range(n)))
    return Outlook(
        batch=max(2, round(b / scale)),
        executions=n,
        places=s.live_capacity / scale,
        per_cell=s.live_capacity / len(s.cells),
        cells=settings.cells / scale,
        group_s=notes.trained_s / max(1, notes.batches * b),
        commit_s=notes.commit_s,
        to_training_s=notes.to_training_s,
        pause_s=notes.to_rollout_s + notes.assess_s,
        join=1.0 / scale,
        groups=tuple(tuple(rest[name]) for name in list(rest)[:keep]),
        fresh=tuple(fresh),
    )


def _longer(lives: Sequence[float], age: float, rng: random.Random) -> float:
    """A life that is known to last longer than `age`."""
    first = bisect_right(lives, age)
    if first == len(lives):
        return age * 1.1 + 1.0
    return lives[rng.randrange(first, len(lives))]


class _Rollout:
    """Executions in places, first come first served."""

    def __init__(self, places: float) -> None:
        self.places = places
        self.running: list[tuple[float, int]] = []
        self.queue: deque[tuple[float, int]] = deque()
        self.left: dict[int, int] = {}
        self.groups = 0
        self.ready = 0

    @property
    def level(self) -> int:
        return len(self.running) + len(self.queue)

    def add(self, lives: Sequence[float], now: float) -> None:
        if not lives:
            self.ready += 1
            return
        self.left[self.groups] = len(lives)
        self.queue.extend((life, self.groups) for life in lives)
        self.groups += 1
        self.fill(now)

    def fill(self, now: float) -> None:
        while self.queue and len(self.running) < self.places:
            life, group = self.queue.popleft()
            heapq.heappush(self.running, (now + life, group))

    def finish_one(self, now: float) -> None:
        _, group = heapq.heappop(self.running)
        self.left[group] -= 1
        if not self.left[group]:
            del self.left[group]
            self.ready += 1
        if self.queue:
            self.fill(now)


class _Ahead:
    """The near future of one schedule: executions in places, cells that train what is ready."""

    def __init__(self, now: Outlook, keep: float) -> None:
        self.now = now
        self.keep = keep
        self.owed = 0  # groups of this burst that are not dispatched yet
        self.rollout = _Rollout(now.places)
        self.t = 0.0
        self.trained = 0.0  # cell-seconds of the groups consumed so far
        self.in_training = 0.0  # cells
        self.joining: float | None = None  # when the cell that is on its way will train
        self.known = self.consumed = 0  # groups dispatched, groups consumed (the batch in work included)
        self._source = _cycle(now.fresh)
        for lives in now.groups:
            self._dispatch(lives)

    def _dispatch(self, lives: Sequence[float]) -> None:
        self.rollout.add(lives, self.t)
        self.known += 1

    def _spare_cells(self) -> float:
        """Cells that the waterlevel does not need."""
        return max(0.0, (self.now.places - self.rollout.level) / self.now.per_cell)

    def begin_burst(self, outstanding: int) -> None:
        self.owed = 0
        self._pass(self.now.pause_s if self.t else 0.0)
        self.joining = None
        self.owed = outstanding - (self.known - self.consumed)
        self._refill()
        if self.keep:
            self.in_training = min(self.in_training, self._kept())
        self.in_training = min(self.in_training, self._spare_cells())

    def _kept(self) -> float:
        """As Lookahead: one cell more while half a batch is ready beyond the open one."""
        backlog = 2 * (self.rollout.ready - self.consumed) >= self.now.batch
        return min(self.keep + self.now.join * backlog, self.now.cells - self.now.join)

    def _refill(self) -> None:
        """Dispatch what the burst still owes; with `keep`, as far as the other cells have places for it."""
        gate = math.inf
        if self.keep:
            gate = self.now.places - self._kept() * self.now.per_cell - self.now.executions
        while self.owed > 0 and (self.rollout.level <= gate or not self.rollout.level):
            self._dispatch(next(self._source))
            self.owed -= 1

    def train_batch(self) -> None:
        """Until the next batch is complete and trained; cells leave rollout while there is room and work."""
        now, rollout = self.now, self.rollout
        self.consumed += now.batch
        limit = self.consumed * now.group_s
        while True:
            available = min(limit, rollout.ready * now.group_s)
            if available > self.trained or now.group_s == 0:
                self._join()
            finish = rollout.running[0][0] if rollout.running else math.inf
            following = min(finish, self.joining if self.joining is not None else math.inf)
            if rollout.ready >= self.consumed and (self.in_training > 0 or following == math.inf):
                done = self.t + (limit - self.trained) / (self.in_training or now.join)
                if done <= following:
                    self.t, self.trained = done, limit
                    return
            self.trained += min(available - self.trained, self.in_training * (following - self.t))
            self.t = following
            if following == finish:
                self._finish_one()
            else:
                self.in_training = min(now.cells, self.in_training + now.join)
                self.joining = None

    def _join(self) -> None:
        """The next cell leaves rollout, if one may and none is on its way."""
        wanted = min(self.now.cells, self._spare_cells())
        if self.joining is None and wanted >= self.in_training + self.now.join:
            self.joining = self.t + self.now.to_training_s

    def commit(self) -> None:
        self._pass(self.now.commit_s)

    def _finish_one(self) -> None:
        """An execution ends now, and what the burst owes takes its place."""
        self.rollout.finish_one(self.t)
        if self.owed > 0:
            self._refill()

    def _pass(self, seconds: float) -> None:
        end = self.t + seconds
        running = self.rollout.running
        while running and running[0][0] <= end:
            self.t = running[0][0]
            self._finish_one()
        self.t = end


def forecast(now: Outlook, mu: int, phi: float, steps: int, total: int, keep: float = 0.0) -> list[float]:
    """Seconds from now at which each of the next `steps` batches commits, with bursts of mu and (phi + mu) * B groups
    outstanding at their start; `total` batches are left in the run. keep > 0: so many cells (scaled as
    `Outlook.cells`) are left free for training, and the burst's groups go out as the others have places for them."""
    ahead = _Ahead(now, keep)
    commits: list[float] = []
    while len(commits) < steps:
        if len(commits) % mu == 0:
            ahead.begin_burst(min(round((mu + phi) * now.batch), (total - len(commits)) * now.batch))
        ahead.train_batch()
        ahead.commit()
        commits.append(ahead.t)
    return commits


def _cycle(groups: Sequence[Sequence[float]]) -> Iterator[Sequence[float]]:
    while True:
        yield from groups
