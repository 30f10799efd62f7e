"""A quick look ahead: how fast would a schedule go from here, if executions last as they did so far?

Invariant: pure and bounded. Executions are drawn from the durations in the notes; those that run are given a residual
life among the recorded ones that lasted longer (a survival estimate). Above `MOST` outstanding executions everything is
scaled down alike, so a forecast costs the same for 10,000 cells as for 10.
"""

from __future__ import annotations

import heapq
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
    places: float
    cells: float
    group_s: float  # training, cell-seconds per group
    commit_s: float
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
    for name, execution in s.executions.items():
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
        places=s.live_capacity / scale,
        cells=len(s.cells) / scale,
        group_s=notes.trained_s / max(1, notes.batches * b),
        commit_s=notes.commit_s + notes.assess_s,
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


def forecast(now: Outlook, mu: int, phi: float, steps: int, total: int) -> list[float]:
    """Seconds from now at which each of the next `steps` batches commits, with bursts of mu and (phi + mu) * B groups
    outstanding at their start; `total` batches are left in the run."""
    rollout = _Rollout(now.places)
    for lives in now.groups:
        rollout.add(lives, 0.0)
    source = _cycle(now.fresh)
    consumed = 0  # groups, incl. the batch in work
    commits: list[float] = []
    t, trained, in_training = 0.0, 0.0, 0.0
    known = len(now.groups)
    per_cell = now.places / now.cells
    while len(commits) < steps:
        first = len(commits) % mu == 0
        if first:
            target = min(round((mu + phi) * now.batch), (total - len(commits)) * now.batch)
            for _ in range(target - (known - consumed)):
                rollout.add(next(source), t)
                known += 1
            in_training = min(in_training, max(0.0, (now.places - rollout.level) // per_cell))
        consumed += now.batch
        limit = consumed * now.group_s
        while True:  # train this batch; leave rollout whenever there is room and work
            available = min(limit, rollout.ready * now.group_s)
            if available > trained or now.group_s == 0:
                in_training = max(in_training, min(now.cells, (now.places - rollout.level) // per_cell))
            done = t + (limit - trained) / in_training if in_training >= 1 and rollout.ready >= consumed else None
            if done is None and rollout.ready >= consumed and not rollout.running:
                done = t + (limit - trained) / max(1.0, in_training)
            if done is not None and (not rollout.running or done <= rollout.running[0][0]):
                t, trained = done, limit
                break
            following = rollout.running[0][0]
            trained += min(available - trained, in_training * (following - t))
            t = following
            rollout.finish_one(t)
        t += now.commit_s
        while rollout.running and rollout.running[0][0] <= t:
            rollout.finish_one(rollout.running[0][0])
        commits.append(t)
    return commits


def _cycle(groups: Sequence[Sequence[float]]) -> Iterator[Sequence[float]]:
    while True:
        yield from groups
