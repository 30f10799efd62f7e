"""Cost of the scheduler's core per event against the number of executions and of cells.

    python benchmarks/scheduler_events.py [--executions 1000,10000,100000] [--cells 8,1000] [--mode elastic] [--json]

Drives the real core with the events of a run, in memory, and times `handle` alone. A run is one burst and more: all
executions are dispatched at once, so the number is also the number outstanding. An event of an execution must cost the
same whether 1,000 or 1,000,000 others exist (placing one is a heap operation: O(log)).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from services.scheduler.core import SchedulerCore
from shared import events as ev
from shared.actor import Publish
from shared.config import CellsConfig, ModelConfig, RunConfig, SchedulerConfig, TasksConfig, TrainingConfig
from shared.ids import execution_id, group_id

N = 16  # executions of a group


class Timed:
    """Feeds events to the core; counts handled and published ones and the time inside `handle`."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core, self.seconds, self.events, self.now = core, 0.0, 0, 0.0
        self.placed: deque[ev.ExecutionPlaced] = deque()

    def feed(self, event: ev.Event) -> list[ev.Event]:
        self.now += 0.001
        begin = time.process_time()
        effects = self.core.handle(event, self.now)
        self.seconds += time.process_time() - begin
        published = [e.event for e in effects if isinstance(e, Publish)]
        self.events += 1 + len(published)
        self.placed.extend(e for e in published if isinstance(e, ev.ExecutionPlaced))
        return published


def start(executions: int, cells: int, mode: str) -> ev.RunStarted:
    groups = executions // (2 * N) * 2
    config = RunConfig(
        name="bench",
        model=ModelConfig(path="m"),
        tasks=TasksConfig(train="t"),
        cells=CellsConfig(count=cells),
        scheduler=SchedulerConfig(mode=mode, mu=1, phi=1.0, groups_per_batch=groups // 2, executions_per_group=N),  # type: ignore[arg-type]
        training=TrainingConfig(steps=2),
    )
    tasks = tuple(f"/t/{i}" for i in range(512))
    return ev.RunStarted(
        run="bench", config=msgspec.to_builtins(config), run_dir="", train_tasks=tasks, eval_tasks={}, started_at=0
    )


def cells_up(cells: int, capacity: int) -> Iterator[ev.Event]:
    for k in range(cells):
        yield ev.CellStarted(cell=k, incarnation="i")
        yield ev.CellTrainerReady(cell=k, incarnation="i", version=0)
        yield ev.CellEngineReady(cell=k, incarnation="i", url="", version=0, capacity=capacity)


def measure(executions: int, cells: int, mode: str, slots: int) -> dict[str, float]:
    """All executions are dispatched, then each is started, finished and assessed; ready groups are announced."""
    timed = Timed(SchedulerCore())
    timed.feed(start(executions, cells, mode))
    for event in cells_up(cells, max(1, slots // cells)):
        timed.feed(event)
    dispatch_us = timed.seconds / max(1, timed.events) * 1e6
    seconds, events, done = timed.seconds, timed.events, 0
    finished: dict[str, int] = {}
    while timed.placed:
        placed = timed.placed.popleft()
        name = placed.execution
        timed.feed(ev.ExecutionStarted(execution=name, attempt=1, key_hash="", harness=""))
        timed.feed(
            ev.ExecutionFinished(
                execution=name,
                group=placed.group,
                task=placed.task,
                attempt=1,
                ending="completed",
                exit_code=0,
                artifact=None,
                seconds=0,
                cpu_seconds=0,
            )
        )
        done += 1
        finished[placed.group] = finished.get(placed.group, 0) + 1
        if finished[placed.group] == N:
            timed.feed(
                ev.GroupReady(
                    group=placed.group, policy_version=0, rewards=(), excluded=0, placeholders=0, tokens_generated=0
                )
            )
    assert done == executions // (2 * N) * 2 * N, (done, executions)
    assert execution_id(group_id(0), 0) not in timed.core.state.executions
    return {
        "executions": executions,
        "cells": cells,
        "events": timed.events,
        "dispatch_us": round(dispatch_us, 2),
        "event_us": round((timed.seconds - seconds) / (timed.events - events) * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", default="1000,10000,100000")
    parser.add_argument("--cells", default="8,1000")
    parser.add_argument("--mode", default="elastic")
    parser.add_argument("--slots", type=int, default=800, help="executions that all cells hold together, at least")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for cells in map(int, args.cells.split(",")):
        for executions in map(int, args.executions.split(",")):
            rows.append(measure(executions, cells, args.mode, max(args.slots, cells)))
            if not args.json:
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
