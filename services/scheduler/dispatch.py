"""What is dispatched: which task is which group, how often each evaluation task runs, with which seeds.

Invariant: a function of run seed, task list and number only. Every epoch is a permutation of all training tasks; an
evaluation set runs the same tasks equally often before and after training (a remainder goes to seeded tasks).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from shared.config import EvalSetConfig
from shared.ids import eval_group_id


class TaskOrder:
    """Group number -> training task: a new seeded shuffle every epoch."""

    def __init__(self, seed: int, tasks: tuple[str, ...]) -> None:
        self._seed = seed
        self._tasks = tasks
        self._epoch = -1
        self._order: list[int] = []

    def task(self, group_number: int) -> str:
        epoch, place = divmod(group_number, len(self._tasks))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = shuffled(f"{self._seed}/epoch/{epoch}", len(self._tasks))
        return self._tasks[self._order[place]]


@dataclass(frozen=True)
class EvalExecution:
    group: str
    index: int
    task: str
    seed: int


def shuffled(seed: str, n: int) -> list[int]:
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return order


def execution_seed(run_seed: int, name: str) -> int:
    """31 bits that depend on the run's seed and the execution's name."""
    digest = hashlib.blake2b(f"{run_seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def evaluation(run_seed: int, phase: str, config: EvalSetConfig, tasks: tuple[str, ...]) -> Iterator[EvalExecution]:
    """The set's executions, one round over all tasks after the other."""
    rounds, rest = divmod(config.executions, len(tasks))
    more = frozenset(shuffled(f"{run_seed}/eval/{config.name}", len(tasks))[:rest])
    for index in range(rounds + 1):
        for number, task in enumerate(tasks):
            if index < rounds or number in more:
                yield EvalExecution(
                    group=eval_group_id(phase, config.name, number),
                    index=index,
                    task=task,
                    seed=execution_seed(run_seed, f"eval/{config.name}/{number}/{index}"),
                )
