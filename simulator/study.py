"""Comparisons: the same workload under several modes, each baseline with its best split; the ablation's rows.

Invariant: all modes of a comparison meet the same executions (seed by seed), the same accelerators and the same target
staleness; the mean staleness that came out is reported beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.scheduler.policy import Policy, policy_for
from services.scheduler.state import Settings
from simulator.presets import Preset, preset, schedule
from simulator.recorded import Recording
from simulator.results import Result
from simulator.setup import Setup
from simulator.variants import Coarse
from simulator.world import World

MODES = ("elastic", "async", "colocate", "lookahead")
MakePolicy = Callable[[Settings], Policy]


@dataclass(frozen=True)
class Mean:
    """Averages over seeds."""

    hours_per_step: float
    hours_total: float
    mean_staleness: float
    rollout_idle: float
    train_idle: float
    training_cells: int  # of the split, where there is one

    def plain(self) -> dict[str, float]:
        return {key: round(value, 7) for key, value in vars(self).items() if key != "training_cells" or value}


def mean(results: Sequence[Result], split: int = 0) -> Mean:
    def average(name: str) -> float:
        return float(sum(getattr(r, name) for r in results) / len(results))

    names = ("hours_per_step", "hours_total", "mean_staleness", "rollout_idle", "train_idle")
    return Mean(**{name: average(name) for name in names}, training_cells=split)


def run(setup: Setup, seeds: Iterable[int], make_policy: MakePolicy = policy_for) -> list[Result]:
    return [World(setup.at(seed), make_policy).run() for seed in seeds]


def run_mode(setup: Setup, mode: str, staleness: float, seeds: Sequence[int]) -> tuple[Mean, list[Result]]:
    """A mode on a setup; Async with the split that is fastest on the first seed."""
    scheduled = schedule(setup, mode, staleness)
    if mode != "async":
        results = run(scheduled, seeds)
        return mean(results), results
    split = best_split(scheduled, seeds[0])
    results = run(replace(scheduled, async_cells=split), seeds)
    return mean(results, split), results


def best_split(setup: Setup, seed: int) -> int:
    """Training cells with which Async is fastest. Time falls, then rises with them: stop when it rises."""
    times: dict[int, float] = {}

    def hours(n: int) -> float:
        if n not in times:
            times[n] = World(replace(setup, async_cells=n).at(seed)).run().hours_per_step
        return times[n]

    low, high = 1, min(setup.cells, setup.engines - 1)
    if setup.cells <= 12:
        return min(range(low, high + 1), key=lambda n: (hours(n), n))
    while high - low > 2:
        third = (high - low) // 3
        a, b = low + third, high - third
        low, high = (low, b) if hours(a) <= hours(b) else (a, high)
    return min(range(low, high + 1), key=lambda n: (hours(n), n))


def floor_hours(setup: Setup, staleness: float) -> float:
    """Mean group latency / (staleness + 1): hours per step when commits are evenly spaced and nothing waits."""
    latency = setup.durations.moments(setup.executions).group_mean_h + setup.assess_s / 3600
    return latency / (staleness + 1)


def compare(name: str, setup: Setup, staleness: float, modes: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """The JSON object of `gyre simulate`."""
    means = {mode: run_mode(setup, mode, staleness, seeds)[0] for mode in modes}
    floor = floor_hours(setup, staleness)
    plain: dict[str, Any] = {
        "preset": name,
        "staleness": staleness,
        "seeds": len(seeds),
        "modes": {mode: m.plain() | {"floor_ratio": round(m.hours_per_step / floor, 5)} for mode, m in means.items()},
    }
    for baseline in ("async", "colocate"):
        if "elastic" in means and baseline in means:
            ratio = means[baseline].hours_per_step / means["elastic"].hours_per_step
            plain[f"speedup_vs_{baseline}"] = round(ratio, 5)
    if "elastic" in means and "lookahead" in means:
        ratio = means["elastic"].hours_per_step / means["lookahead"].hours_per_step
        plain["lookahead_speedup_vs_elastic"] = round(ratio, 5)
    plain["floor_hours_per_step"] = round(floor, 7)
    return plain


def compare_recorded(
    name: str, recording: Recording, modes: Sequence[str], seeds: Sequence[int], changes: dict[str, Any]
) -> dict[str, Any]:
    """A recorded run against its own simulation, and what other schedules would have done on the same machine.

    The run's own mode is simulated as it ran; another mode with the schedule of the same mean staleness (its batches
    as in the paper: streamed by elastic and lookahead only). `changes`: fields of Setup that are to be as given
    (mu, phi, async_cells, streamed); they hold for every mode asked for."""
    setup = recording.setup()
    own = run(setup, seeds)
    rows = {}
    for mode in modes:
        scheduled = setup if mode == setup.mode else schedule(setup, mode, setup.staleness)
        scheduled = replace(scheduled, **changes)
        if mode == "async" and "async_cells" not in changes and mode != setup.mode:
            scheduled = replace(scheduled, async_cells=best_split(scheduled, seeds[0]))
        m = mean(run(scheduled, seeds), scheduled.async_cells if mode == "async" else 0)
        shown = {"mu": scheduled.mu, "phi": scheduled.phi, "streamed": scheduled.streamed}
        rows[mode] = m.plain() | {"seconds_total": round(3600 * m.hours_total, 2)} | shown
    measured = recording.hours_per_step
    simulated = mean(own)
    names = (
        "steps", "capacity", "train_work_h", "load_share", "load_at", "parts", "commit_s", "assess_s", "to_training_s",
        "to_rollout_s", "refit_s", "pull_s",
    )  # fmt: skip
    return {
        "preset": name,
        "staleness": setup.staleness,
        "seeds": len(seeds),
        "modes": rows,
        "floor_hours_per_step": round(floor_hours(setup, setup.staleness), 7),
        "measured": {
            "mode": setup.mode,
            "hours_per_step": round(measured, 7),
            "seconds_total": round(3600 * measured * setup.steps, 2),
            "mean_staleness": round(sum(recording.staleness) / len(recording.staleness), 5),
            "simulated_seconds_total": round(3600 * simulated.hours_total, 2),
            "simulated_hours_per_step": round(simulated.hours_per_step, 7),
            "simulated_staleness": round(simulated.mean_staleness, 5),
            "error_percent": round(100 * (simulated.hours_per_step / measured - 1), 2),
        },
        "calibration": {key: round(float(getattr(setup, key)), 6) for key in names},
    }


def published_rows(p: Preset, results: dict[float, dict[str, Any]]) -> list[dict[str, Any]]:
    """Published ratio, ours and the error, for each ratio of the paper. `results`: `compare` by staleness."""
    rows = []
    for item in p.published:
        ours = results[item.staleness][f"speedup_vs_{item.baseline}"]
        rows.append(
            {
                "baseline": item.baseline,
                "staleness": item.staleness,
                "paper": round(item.ratio, 4),
                "simulated": round(ours, 4),
                "error_percent": round(100 * (ours / item.ratio - 1), 2),
                "calibrated": item == p.target,
            }
        )
    return rows


# ------------------------------------------------------------------------------------------------------------ ablation


@dataclass(frozen=True)
class Row:
    change: str
    paper_percent: float
    base: str
    variant: str


ROWS = (
    Row("streaming added to Async", -11.6, "async", "async_streamed"),
    Row("Async: one node group moved from training to rollout", 7.7, "async_streamed", "async_moved"),
    Row("Async: longer bursts (mu 3, phi 0.5)", 29.9, "async_streamed", "async_long"),
    Row("Colocate: half of the cells standalone rollout cells", -2.9, "colocate", "colocate_standalone"),
    Row("half of the cells switching together instead of eight independent ones", 19.0, "elastic", "coarse"),
    Row("8-node cells instead of 4-node cells", 2.2, "elastic", "big_cells"),
    Row("one step per burst (mu 1, phi 1.5)", 10.9, "elastic", "one_step"),
    Row("equivalent streamed Async against one step per burst", 24.0, "one_step", "async_streamed"),
)


def ablation(seeds: Sequence[int]) -> dict[str, Any]:
    """12 steps of nl2repo-122b; hours of each configuration, and the paper's percentage beside ours."""
    elastic = replace(preset("nl2repo-122b").setup, steps=12)
    hours, splits = _ablation_hours(elastic, seeds)
    rows = []
    for row in ROWS:
        ours = 100 * (hours[row.variant] / hours[row.base] - 1)
        rows.append(
            {
                "change": row.change,
                "paper_percent": row.paper_percent,
                "simulated_percent": round(ours, 2),
                "error_points": round(ours - row.paper_percent, 2),
                "same_sign": (ours > 0) == (row.paper_percent > 0),
            }
        )
    return {
        "preset": "ablation",
        "staleness": 1.5,
        "seeds": len(seeds),
        "hours_total": {k: round(v, 4) for k, v in hours.items()},
        "paper_hours_fastest": 16.12,
        "splits": splits,
        "rows": rows,
    }


def _ablation_hours(elastic: Setup, seeds: Sequence[int]) -> tuple[dict[str, float], dict[str, int]]:
    def total(setup: Setup, make_policy: MakePolicy = policy_for) -> float:
        return mean(run(setup, seeds, make_policy)).hours_total

    one_step = replace(elastic, mu=1, phi=1.5)
    baseline = schedule(elastic, "async", 1.5)
    split = best_split(replace(baseline, streamed=True), seeds[0])  # of the streamed variant, in all Async rows
    baseline = replace(baseline, async_cells=split)
    streamed = replace(baseline, streamed=True)
    colocate = schedule(elastic, "colocate", 1.5)
    pool = elastic.cells // 2

    def coarse(settings: Settings) -> Coarse:
        return Coarse(settings, pool=pool)

    hours = {
        "elastic": total(elastic),
        "lookahead": total(replace(elastic, mode="lookahead")),
        "one_step": total(one_step),
        "big_cells": total(
            replace(
                elastic, cells=elastic.cells // 2, capacity=2 * elastic.capacity, train_work_h=elastic.train_work_h / 2
            )
        ),
        "async": total(baseline),
        "async_streamed": total(streamed),
        "async_moved": total(replace(streamed, async_cells=max(1, split - 1))),
        "async_long": total(replace(streamed, mu=3, phi=0.5)),
        "colocate": total(colocate),
        "colocate_standalone": total(replace(colocate, cells=pool, standalone=elastic.cells - pool)),
        "coarse": total(elastic, coarse),
    }
    return hours, {"async_training_cells": split, "switching_cells": pool}
