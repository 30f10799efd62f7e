"""How long executions take and what one batch costs to train: the inputs of a simulation.

Invariant: the duration of an execution is a function of (seed, group number, index) only, so every mode, split and
policy meets exactly the same work. Durations are hours; a group's executions share a task factor.

    ln duration = ln median + task_sigma * Z(group) + execution_sigma * Z(execution),  cut off at `limit_h`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SAMPLES = 40_000  # groups drawn to evaluate moments; a fixed seed makes fits reproducible


@dataclass(frozen=True)
class Durations:
    """A parametric law, or (with `recorded`) a bootstrap over recorded groups."""

    median_h: float = 1.0
    task_sigma: float = 0.3
    execution_sigma: float = 0.3
    limit_h: float = math.inf
    recorded: tuple[tuple[float, ...], ...] = ()  # durations of the executions of real groups
    in_order: bool = False  # group k lasts as recorded group k did; only groups beyond the recorded ones are drawn

    def group(self, seed: int, number: int, executions: int) -> list[float]:
        """Durations of the executions of group `number`."""
        rng = np.random.Generator(np.random.PCG64([seed, number]))
        if self.recorded:
            replayed = self.in_order and number < len(self.recorded)
            task = self.recorded[number if replayed else int(rng.integers(len(self.recorded)))]
            if len(task) == executions:
                return list(task)
            return [task[i] for i in rng.integers(len(task), size=executions)]
        z = rng.standard_normal(executions + 1)
        scale = self.median_h * math.exp(self.task_sigma * z[0])
        hours: list[float] = np.minimum(scale * np.exp(self.execution_sigma * z[1:]), self.limit_h).tolist()
        return hours

    def moments(self, executions: int) -> Moments:
        if self.recorded:
            groups = [
                self.group(0, number, executions) for number in range(len(self.recorded) if self.in_order else 4000)
            ]
            return moments_of(np.array(groups))
        return moments_of(self._matrix(executions))

    def _matrix(self, executions: int) -> np.ndarray:
        rng = np.random.default_rng(20260911)
        task = rng.standard_normal((SAMPLES, 1))
        own = rng.standard_normal((SAMPLES, executions))
        hours = self.median_h * np.exp(self.task_sigma * task + self.execution_sigma * own)
        return np.minimum(hours, self.limit_h)


@dataclass(frozen=True)
class Moments:
    """What papers print about a workload. Hours."""

    execution_mean_h: float
    group_mean_h: float  # the slowest execution of a group
    groups_over_4h: float
    executions_at_limit: float
    groups_at_limit: float


def moments_of(hours: np.ndarray) -> Moments:
    """`hours`: groups x executions."""
    slowest = hours.max(axis=1)
    top = hours.max()
    return Moments(
        execution_mean_h=float(hours.mean()),
        group_mean_h=float(slowest.mean()),
        groups_over_4h=float((slowest >= 4).mean()),
        executions_at_limit=float((hours >= top).mean()),
        groups_at_limit=float((slowest >= top).mean()),
    )


def fit(execution_mean_h: float, group_mean_h: float, over_4h: float, at_limit: float, executions: int) -> Durations:
    """The law with these published moments: mean per execution, mean per group, share of groups >= 4 h, and the share
    of executions that end at the overall limit. Four equations, four unknowns; least squares on one set of draws."""
    from scipy.optimize import least_squares

    rng = np.random.default_rng(20260911)
    task, own = rng.standard_normal((SAMPLES, 1)), rng.standard_normal((SAMPLES, executions))

    def law(x: np.ndarray) -> Durations:
        return Durations(math.exp(x[0]), abs(x[1]), abs(x[2]), math.exp(x[3]))

    def miss(x: np.ndarray) -> list[float]:
        d = law(x)
        raw = d.median_h * np.exp(d.task_sigma * task + d.execution_sigma * own)
        hours = np.minimum(raw, d.limit_h)
        slowest = hours.max(axis=1)
        over = _soft_share(np.log(slowest), math.log(4.0), 0.02)
        cut = _soft_share(np.log(raw).ravel(), x[3], 0.02)
        return [
            hours.mean() / execution_mean_h - 1,
            slowest.mean() / group_mean_h - 1,
            over / over_4h - 1,
            0.3 * (cut / at_limit - 1),
        ]

    start = np.array([math.log(execution_mean_h * 0.93), 0.25, 0.25, math.log(2 * group_mean_h)])
    return law(least_squares(miss, start, diff_step=1e-3).x)


def _soft_share(values: np.ndarray, threshold: float, width: float) -> float:
    """Share of values above a threshold, smoothed so that a fit has a gradient."""
    return float((1 / (1 + np.exp(-(values - threshold) / width))).mean())


def of_records(groups: Sequence[Sequence[float]], in_order: bool = False) -> Durations:
    """The recorded durations themselves (hours), drawn group by group or, `in_order`, one after the other."""
    return Durations(recorded=tuple(tuple(g) for g in groups if g), in_order=in_order)
