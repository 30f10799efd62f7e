"""Setups from files: a simulation file (YAML with Setup's own keys), a run file plus a trace, a trace of durations.

Invariant: unknown keys are refused, with the keys there are; a Setup that is returned can be simulated.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shared.config import RunConfig
from simulator.setup import Setup
from simulator.workloads import Durations, fit, of_records


class BadSetup(ValueError):
    """A file that cannot be simulated; the message names the key and the fix."""


def read_trace(path: Path) -> Durations:
    """JSON lines with `group` (any text) and `hours` or `seconds`: one line per execution."""
    groups: dict[str, list[float]] = defaultdict(list)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            hours = float(row["hours"] if "hours" in row else row["seconds"] / 3600)
            groups[str(row["group"])].append(hours)
        except (ValueError, KeyError, TypeError) as error:
            raise BadSetup(
                f'{path}:{number}: a line must be like {{"group": "g1", "hours": 1.5}} (or "seconds"): {error!r}'
            ) from error
    if not groups:
        raise BadSetup(f"{path}: no executions in it")
    return of_records(list(groups.values()))


def read_setup(path: Path, trace: Path | None = None, train_work_h: float | None = None) -> Setup:
    """A simulation file, or a run file (it has a `model`) with a trace and the training work."""
    import yaml

    try:
        plain = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise BadSetup(f"{path} cannot be read: {error}") from error
    if not isinstance(plain, dict):
        raise BadSetup(f"{path} must be a mapping of keys such as cells, capacity, durations")
    if "model" in plain:
        from shared.config import load

        if trace is None or train_work_h is None:
            raise BadSetup(f"{path} is a run file: give --durations TRACE and --train-hours CELL_HOURS_PER_BATCH too")
        return replace(of_run_file(load(path)), durations=read_trace(trace), train_work_h=train_work_h)
    return _from_plain(plain, path, trace, train_work_h)


def _from_plain(plain: dict[str, Any], path: Path, trace: Path | None, train_work_h: float | None) -> Setup:
    known = {f.name for f in fields(Setup)}
    if unknown := sorted(set(plain) - known):
        raise BadSetup(f"{path}: unknown keys {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    values: dict[str, Any] = {"mode": "elastic", "mu": 3, "phi": 0.5, "steps": 48} | plain
    executions = int(values.get("executions", 16))
    durations = values.get("durations")
    if trace is not None:
        values["durations"] = read_trace(trace)
    elif isinstance(durations, dict):
        values["durations"] = durations_of(durations, executions, path)
    else:
        raise BadSetup(f"{path}: durations must be a mapping (mean_h, group_mean_h, over_4h, at_limit) or --durations")
    if train_work_h is not None:
        values["train_work_h"] = train_work_h
    missing = {"cells", "capacity", "groups", "executions"} - set(values)
    if missing:
        raise BadSetup(f"{path}: {', '.join(sorted(missing))} missing")
    return Setup(**values)


def durations_of(plain: dict[str, Any], executions: int, path: Path) -> Durations:
    """Parameters of the law, or the moments it is to have, or {trace: FILE}."""
    if "trace" in plain:
        return read_trace(path.parent / str(plain["trace"]))
    if "mean_h" in plain:
        try:
            mean, group, over, limit = (float(plain[k]) for k in ("mean_h", "group_mean_h", "over_4h", "at_limit"))
            return fit(mean, group, over, limit, executions)
        except KeyError as error:
            raise BadSetup(f"{path}: durations needs mean_h, group_mean_h, over_4h and at_limit") from error
    allowed = {"median_h", "task_sigma", "execution_sigma", "limit_h"}
    if unknown := sorted(set(plain) - allowed):
        raise BadSetup(
            f"{path}: unknown keys in durations: {', '.join(unknown)}; there are {', '.join(sorted(allowed))}"
        )
    return Durations(**{k: float(v) for k, v in plain.items()})  # type: ignore[arg-type]


def of_run_file(config: RunConfig) -> Setup:
    """Schedule and cluster of a run file; the workload is the caller's."""
    s = config.scheduler
    return Setup(
        mode=s.mode,
        mu=s.mu,
        phi=s.phi,
        steps=config.training.steps,
        cells=config.cells.count,
        standalone=config.cells.standalone,
        capacity=config.cells.capacity,
        groups=s.groups_per_batch,
        executions=s.executions_per_group,
        async_cells=s.async_training_cells,
        streamed=s.streaming,
        supply_fraction=s.supply_fraction,
        supply_hold_s=s.supply_hold_s,
        durations=Durations(limit_h=math.inf),
        seed=config.seed,
    )
