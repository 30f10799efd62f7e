"""A simulation at scale, and the cost of the scheduler's core per event against executions outstanding.

    python benchmarks/simulator_scale.py [--cells 10000] [--executions 1000000] [--mode elastic] [--curve] [--json]

One process, one core. Prints seconds, peak memory, executions; with --curve also the core's microseconds per event.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

from simulator.setup import Setup
from simulator.workloads import Durations
from simulator.world import World


def setup(cells: int, executions: int, mode: str) -> Setup:
    """12 steps; places for about the executions outstanding at a burst's start, as in the paper's clusters."""
    groups = max(1, executions // (12 * 16))
    mu, phi = {"async": (1, 1.5), "colocate": (4, 0.0)}.get(mode, (3, 0.5))
    return Setup(
        mode=mode, mu=mu, phi=phi, steps=12, cells=cells, capacity=max(1, 3 * groups * 16 // cells), groups=groups,
        executions=16, durations=Durations(1.82, 0.21, 0.265, 4.1), train_work_h=cells / 2, parts=1,
        supply_fraction=0.25, async_cells=cells // 2, streamed=mode in ("elastic", "lookahead"),
    )  # fmt: skip


def measure(cells: int, executions: int, mode: str) -> dict[str, Any]:
    begin = time.perf_counter()
    cpu = time.process_time()
    result = World(setup(cells, executions, mode)).run()
    return {
        "mode": mode,
        "cells": cells,
        "executions": result.executions,
        "steps": result.steps,
        "hours_per_step": round(result.hours_per_step, 4),
        "mean_staleness": round(result.mean_staleness, 3),
        "seconds": round(time.perf_counter() - begin, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def curve() -> list[dict[str, float]]:
    from benchmarks.scheduler_events import measure as core

    return [
        core(executions, cells, "elastic", max(800, cells))
        for cells in (8, 10_000)
        for executions in (1_000, 10_000, 100_000, 1_000_000)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--mode", default="elastic")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    answer: dict[str, Any] = measure(args.cells, args.executions, args.mode)
    if args.curve:
        answer["curve"] = curve()
    print(json.dumps(answer) if args.json else json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
