"""A cluster for a workload: cells, mu and phi for a target staleness, expected hours per step, and what limits them.

Invariant: the proposal is the best of the candidates under the simulator, and every estimate that went into it (memory
of a cell, places, training work) is in the answer, so that a user can replace it by a measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from simulator.presets import general_schedule, schedule
from simulator.setup import Setup
from simulator.study import best_split, floor_hours
from simulator.workloads import Durations
from simulator.world import World


class NoPlan(ValueError):
    """The model does not fit; the message says how many accelerators it takes."""


@dataclass(frozen=True)
class Gpu:
    memory_gb: float
    teraflops: float  # dense bfloat16


GPUS = {
    "a100": Gpu(80, 312),
    "h100": Gpu(80, 989),
    "h200": Gpu(141, 989),
    "b200": Gpu(180, 2250),
    "mi300x": Gpu(192, 1307),
}

TRAIN_BYTES = 18  # per parameter: bf16 weights 2, gradients 4, fp32 master 4, Adam 8
MARGIN = 1.2  # activations, buffers
PLACES_PER_GPU = 6.0  # 192 executions on 4 nodes of 8: the paper's figure


@dataclass(frozen=True)
class Wish:
    """What is to be planned for."""

    gpus: int
    gpu: str
    parameters: float
    durations: Durations
    active: float = 0.0  # parameters active per token; 0: all
    tokens: float = 1e6  # tokens computed in training per execution
    mfu: float = 0.15  # share of the peak that training reaches
    places_per_gpu: float = PLACES_PER_GPU
    groups: int = 32
    executions: int = 16
    steps: int = 12
    staleness: float = 1.5
    train_hours: float = 0.0  # GPU-hours of training per batch, if measured


def smallest_cell(wish: Wish) -> int:
    """GPUs that hold weights, gradients and optimizer, rounded up to 2^k or 3 * 2^k: they divide into layouts."""
    gpu = GPUS[wish.gpu]
    need = wish.parameters * TRAIN_BYTES * MARGIN / (gpu.memory_gb * 1e9)
    sizes: list[int] = sorted({f << k for k in range(14) for f in (1, 3)})
    return next(size for size in sizes if size >= need)


def train_gpu_hours(wish: Wish) -> float:
    """GPU-hours of one batch: 6 * active parameters * tokens / (peak * mfu)."""
    if wish.train_hours:
        return wish.train_hours
    flops = 6 * (wish.active or wish.parameters) * wish.tokens * wish.groups * wish.executions
    return flops / (GPUS[wish.gpu].teraflops * 1e12 * wish.mfu) / 3600


def candidates(wish: Wish) -> list[Setup]:
    """Every number of cells that fits, with the schedules of the target staleness, for the live elastic modes."""
    least = smallest_cell(wish)
    most_cells = wish.gpus // least
    if most_cells < 2:
        raise NoPlan(
            f"a cell for {wish.parameters:.3g} parameters takes {least} {wish.gpu} "
            f"({TRAIN_BYTES} bytes per parameter x {MARGIN}); two cells need {2 * least}, there are {wish.gpus}"
        )
    counts = sorted({most_cells} | {n for n in (2, 3, 4, 6, 8, 12, 16) if n <= most_cells})
    out = []
    for cells in counts:
        size = wish.gpus // cells
        for mu in range(1, int(2 * wish.staleness + 1) + 1):
            out.append(
                Setup(
                    mode="elastic",
                    mu=mu,
                    phi=wish.staleness - (mu - 1) / 2,
                    steps=wish.steps,
                    cells=cells,
                    capacity=max(1, int(size * wish.places_per_gpu)),
                    groups=wish.groups,
                    executions=wish.executions,
                    durations=wish.durations,
                    train_work_h=train_gpu_hours(wish) / size,
                    supply_fraction=0.25,
                    parts=8,
                )
            )
    return out


def plan(wish: Wish) -> dict[str, Any]:
    """The JSON object of `gyre plan`."""
    tried = [(World(setup).run(), setup) for setup in candidates(wish)]
    tried.sort(key=lambda pair: (pair[0].hours_per_step, pair[1].cells))
    result, best = tried[0]
    mu, phi = general_schedule("lookahead", wish.staleness)
    ahead = World(replace(best, mode="lookahead", mu=mu, phi=phi)).run()
    floor = floor_hours(best, wish.staleness)
    split = schedule(best, "async", wish.staleness)
    split = replace(split, async_cells=best_split(split, best.seed))
    fixed = World(split).run().hours_per_step
    colocated = World(schedule(best, "colocate", wish.staleness)).run().hours_per_step
    return {
        "gpus": wish.gpus,
        "gpu": wish.gpu,
        "cells": best.cells,
        "gpus_per_cell": wish.gpus // best.cells,
        "smallest_cell_gpus": smallest_cell(wish),
        "capacity_per_cell": best.capacity,
        "train_gpu_hours_per_batch": round(train_gpu_hours(wish), 3),
        "staleness": wish.staleness,
        "mu": best.mu,
        "phi": best.phi,
        "hours_per_step": round(result.hours_per_step, 5),
        "lookahead_hours_per_step": round(ahead.hours_per_step, 5),
        "async_hours_per_step": round(fixed, 5),
        "async_training_cells": split.async_cells,
        "colocate_hours_per_step": round(colocated, 5),
        "floor_hours_per_step": round(floor, 5),
        "rollout_idle": round(result.rollout_idle, 4),
        "train_idle": round(result.train_idle, 4),
        "limited_by": limits(best, result.hours_per_step, floor),
        "run_file": (
            f"cells: {{count: {best.cells}, capacity: {best.capacity}}}, scheduler: {{mode: elastic, mu: {best.mu}, "
            f"phi: {best.phi:g}, groups_per_batch: {best.groups}, executions_per_group: {best.executions}}}"
        ),
        "alternatives": [
            {"cells": s.cells, "mu": s.mu, "phi": s.phi, "hours_per_step": round(r.hours_per_step, 5)}
            for r, s in tried[1:6]
        ],
    }


def limits(setup: Setup, hours: float, floor: float) -> dict[str, float | str]:
    """Share of the hours per step that would be saved without training work, with unlimited places; and the name of
    what limits most: the latency of the groups themselves where neither would save a tenth."""
    free_training = World(replace(setup, train_work_h=1e-9)).run().hours_per_step
    places = (setup.mu + math.ceil(setup.phi)) * setup.groups * setup.executions * 2
    free_places = World(replace(setup, capacity=places)).run().hours_per_step
    saved = {"training": 1 - free_training / hours, "places": 1 - free_places / hours}
    most = max(saved, key=lambda k: (saved[k], k))
    return {
        "what": most if saved[most] >= 0.1 else "latency of the groups",
        "saved_without_training_work": round(saved["training"], 4),
        "saved_with_unlimited_places": round(saved["places"], 4),
        "floor_ratio": round(hours / floor, 4),
    }
