"""The published runs as setups: what was put in, what it was calibrated on, what the paper says came out.

Invariant: per workload exactly one published number is used to set `train_work_h` (named in `calibrated_on`, found
again by `calibrate`); what else is in `published` came out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from simulator.setup import Setup
from simulator.workloads import Durations


class NoSuchPreset(ValueError):
    """The message lists the presets there are."""


# Schedules of a target mean staleness: (mu, phi) of each mode. At 1.5 as published; at 1 the paper's are not public.
SCHEDULES: dict[float, dict[str, tuple[int, float]]] = {
    1.5: {"elastic": (3, 0.5), "lookahead": (3, 0.5), "async": (1, 1.5), "colocate": (4, 0.0)},
    1.0: {"elastic": (2, 0.5), "lookahead": (2, 0.5), "async": (1, 1.0), "colocate": (3, 0.0)},
}

SUPPLY_FRACTION = 0.25  # not public
SUPPLY_HOLD_S = 60.0  # not public


@dataclass(frozen=True)
class Published:
    """A ratio that the paper prints: hours of the baseline / hours of elastic, at a staleness target."""

    baseline: str
    staleness: float
    ratio: float


@dataclass(frozen=True)
class Preset:
    name: str
    title: str
    setup: Setup  # elastic at 1.5
    inputs: tuple[str, ...]  # published values that went in
    assumptions: tuple[str, ...]  # what is not public and was chosen
    calibrated_on: str
    target: Published | float  # the one number: a ratio, or hours of the whole run
    published: tuple[Published, ...]
    published_hours: dict[str, float] = field(default_factory=dict)  # of the whole run
    notes: tuple[str, ...] = ()


# Fitted by workloads.fit to the published moments of NL2RepoBench with 122B (a test fits them again):
# 1.93 h per execution, 2.96 h per query, 9.51 % of queries >= 4 h, 0.87 % of executions at the overall limit.
NL2REPO = Durations(median_h=1.8236, task_sigma=0.2113, execution_sigma=0.2650, limit_h=4.1085)

# Same spread; median and limit from two published shares: 61.1 % of queries >= 4 h, 38.2 % of those at the limit.
NL2REPO_BIG = Durations(median_h=2.6982, task_sigma=0.2113, execution_sigma=0.2650, limit_h=5.1892)

# Not public. In units of the mean (1 h): only ratios are published, and switches are short against it.
DEEPSWE = Durations(median_h=0.7985, task_sigma=0.3, execution_sigma=0.6, limit_h=8.0)
TERMINALBENCH = Durations(median_h=0.7371, task_sigma=0.5, execution_sigma=0.6, limit_h=9.0)

_COMMON = (
    "execution durations are lognormal with a task factor shared by the group, cut at the overall limit",
    f"supply fraction {SUPPLY_FRACTION} held for {SUPPLY_HOLD_S:.0f} s (not public), reduction + optimizer step + "
    "checkpoint 20 s, assessment 60 s; switches 8.52 s and 3.46 s as measured in the paper",
    "Async and Colocate train a batch when it is complete; elastic and lookahead stream",
    "Async has its best split, searched",
)

_NL2REPO_122B = Setup(
    mode="elastic", mu=3, phi=0.5, steps=48, cells=8, capacity=192, groups=32, executions=16, durations=NL2REPO,
    train_work_h=4.0, parts=8, supply_fraction=SUPPLY_FRACTION, supply_hold_s=SUPPLY_HOLD_S,
)  # fmt: skip

_SHORT = replace(_NL2REPO_122B, cells=6, groups=48, steps=24, durations=DEEPSWE, train_work_h=3.6)

PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset(
            name="nl2repo-122b",
            title="122B, NL2RepoBench, 48 steps, 8 cells of 4 nodes",
            setup=_NL2REPO_122B,
            inputs=(
                "mean 1.93 h per execution, 2.96 h per query, 9.51 % of queries >= 4 h, 0.87 % overall timeouts",
                "8 cells, B = 32, N = 16",
            ),
            assumptions=(
                "192 executions per cell: published for the same model and cell size on the other benchmarks", *_COMMON,
            ),
            calibrated_on="16.12 h for 12 steps (the ablation's fastest configuration)",
            target=16.12,
            published=(
                Published("async", 1.5, 1.53),
                Published("colocate", 1.5, 1.47),
                Published("async", 1.0, 1.42),
                Published("colocate", 1.0, 1.36),
            ),
            notes=("The paper prints ranges over both targets (1.42-1.53 and 1.36-1.47); which end is which target is "
                   "not public. The table takes the larger for 1.5.",),
        ),
        Preset(
            name="nl2repo-2.4t",
            title="2.4T, NL2RepoBench, 48 steps, 4 cells of 48 nodes",
            setup=replace(
                _NL2REPO_122B, cells=4, capacity=448, durations=NL2REPO_BIG,
                train_work_h=1.55,
            ),
            inputs=(
                "61.1 % of queries >= 4 h, 38.2 % of those ended in an overall timeout; spread as with 122B",
                "4 cells, B = 32, N = 16, total inference concurrency 384",
            ),
            assumptions=(
                "the concurrency of 384 counts model calls, not executions: by Little's law the published 1.571 h per "
                "step with executions of 2 h or more needs over 650 running at once. A fifth of an execution's time is "
                "model calls, so that all 1792 outstanding executions are admitted (448 per cell) at full speed",
                *_COMMON,
            ),
            calibrated_on="1.21x vs Colocate",
            target=Published("colocate", 1.5, 91.47 / 75.42),
            published=(Published("async", 1.5, 134.55 / 75.42), Published("colocate", 1.5, 91.47 / 75.42)),
            published_hours={"elastic": 75.42, "async": 134.55, "colocate": 91.47},
        ),
        Preset(
            name="deepswe-122b",
            title="122B, DeepSWE, 24 steps, 6 cells of 4 nodes",
            setup=_SHORT,
            inputs=("6 cells, B = 48, N = 16, 192 executions per cell",),
            assumptions=(
                "no durations are public: a mean of 1 h (the unit), spread 0.3 between and 0.6 within tasks, limit at "
                "8 means. The spread was picked by hand among a few so that the Colocate ratios come near: for this "
                "workload they are not pure predictions",
                *_COMMON,
            ),
            calibrated_on="1.569x vs Async at staleness 1",
            target=Published("async", 1.0, 1.569),
            published=(
                Published("async", 1.5, 1.572),
                Published("colocate", 1.5, 1.824),
                Published("async", 1.0, 1.569),
                Published("colocate", 1.0, 1.610),
            ),
        ),
        Preset(
            name="terminalbench-122b",
            title="122B, TerminalBench, 24 steps, 6 cells of 4 nodes",
            setup=replace(_SHORT, durations=TERMINALBENCH, train_work_h=3.05),
            inputs=("6 cells, B = 48, N = 16, 192 executions per cell",),
            assumptions=(
                "no durations are public: a mean of 1 h (the unit), spread 0.5 between and 0.6 within tasks, limit at "
                "9 means; picked by hand like DeepSWE's",
                *_COMMON,
            ),
            calibrated_on="1.383x vs Async at staleness 1",
            target=Published("async", 1.0, 1.383),
            published=(
                Published("async", 1.5, 1.430),
                Published("colocate", 1.5, 1.849),
                Published("async", 1.0, 1.383),
                Published("colocate", 1.0, 1.809),
            ),
        ),
    )
}  # fmt: skip

NAMES = (*PRESETS, "ablation")


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise NoSuchPreset(f"no preset {name!r}: choose one of {', '.join(NAMES)}, or give a run file")
    return PRESETS[name]


def schedule(setup: Setup, mode: str, staleness: float) -> Setup:
    """The setup of a mode at a mean staleness; the baselines train batch by batch."""
    if staleness in SCHEDULES:
        mu, phi = SCHEDULES[staleness][mode]
    else:
        mu, phi = general_schedule(mode, staleness)
    return replace(setup, mode=mode, mu=mu, phi=phi, streamed=mode in ("elastic", "lookahead"))


def general_schedule(mode: str, staleness: float) -> tuple[int, float]:
    """(mu, phi) with mean (mu - 1)/2 + phi = staleness, chosen as the paper chose them for 1.5."""
    whole = int(2 * staleness + 1)
    mu = {"async": 1, "colocate": whole}.get(mode, max(1, whole - 1))
    return mu, max(0.0, staleness - (mu - 1) / 2)


def calibrate(miss: Callable[[float], float], low: float, high: float, tries: int = 7) -> float:
    """The training work at which `miss` (rising) crosses zero."""
    for _ in range(tries):
        middle = (low + high) / 2
        low, high = (middle, high) if miss(middle) < 0 else (low, middle)
    return (low + high) / 2
