"""What is simulated: one cluster, one workload, one schedule. Plain data; presets, run files and the planner make it.

Invariant: everything that a result depends on is a field here (plus the code), so equal setups give equal results.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from shared.config import CellsConfig, ModelConfig, RunConfig, SchedulerConfig, TasksConfig, TrainingConfig
from shared.events import RunStarted
from simulator.workloads import Durations

TASKS = tuple(f"/tasks/{i}" for i in range(512))


@dataclass(frozen=True)
class Setup:
    """Hours where the name ends in _h, seconds in _s; counts otherwise."""

    mode: str
    mu: int
    phi: float
    steps: int
    cells: int
    capacity: int  # executions that one cell may hold
    groups: int  # B
    executions: int  # N
    durations: Durations = field(default_factory=Durations)
    train_work_h: float = 1.0  # cell-hours of forward and backward per batch
    load_share: float = 0.0  # share of an execution's time that grows with the executions in its cell ...
    load_at: float = 1.0  # ... when there are so many of them: the load under which the durations were measured
    async_cells: int = 1
    standalone: int = 0  # engines that never train, beside the cells
    supply_fraction: float = 0.5
    supply_hold_s: float = 60.0
    to_training_s: float = 8.52
    to_rollout_s: float = 3.46
    refit_s: float = 3.46  # new weights into an engine that serves
    pull_s: float = 3.46  # new weights into a satellite that stays in training
    commit_s: float = 20.0
    assess_s: float = 60.0
    parts: int = 16  # micro-steps per group
    streamed: bool = True  # False: a batch opens when all its groups are ready
    seed: int = 0

    @property
    def engines(self) -> int:
        return self.cells + self.standalone

    @property
    def staleness(self) -> float:
        """What the schedule aims at in steady state: (mu - 1)/2 + phi."""
        return (self.mu - 1) / 2 + self.phi

    def at(self, seed: int) -> Setup:
        return replace(self, seed=seed)


def run_started(setup: Setup) -> RunStarted:
    """The first event of the simulated stream, with a run file like a live run's."""
    config = RunConfig(
        name="simulated",
        seed=setup.seed,
        model=ModelConfig(path=""),
        tasks=TasksConfig(train=""),
        cells=CellsConfig(count=setup.cells, standalone=setup.standalone, capacity=setup.capacity),
        scheduler=SchedulerConfig(
            mode=setup.mode,  # type: ignore[arg-type]
            mu=setup.mu,
            phi=setup.phi,
            groups_per_batch=setup.groups,
            executions_per_group=setup.executions,
            supply_fraction=setup.supply_fraction,
            supply_hold_s=setup.supply_hold_s,
            async_training_cells=setup.async_cells,
            streaming=setup.streamed,
        ),
        training=TrainingConfig(steps=setup.steps),
    )
    return RunStarted(
        run="simulated",
        config=msgspec.to_builtins(config),
        run_dir="",
        train_tasks=TASKS,
        eval_tasks={},
        started_at=0.0,
    )
