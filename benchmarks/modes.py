"""Elastic against async and colocate, live: the same tasks, seeds, model, mean staleness and cells under each.

    python benchmarks/modes.py [--json] [--steps 12] [--modes elastic,async,colocate]

The workload is benchmarks/modes_workload/run.yaml: the example's tasks and policy (made deeper, see deepen.py) and
scout with tools that take time and have a long tail. Every cell gets the same fixed share of the processor for its
engine and trainer together. The schedules are the paper's at staleness 1.5: elastic (mu 3, phi 0.5), async (1, 1.5),
colocate (4, 0). Async and colocate train a batch when it is complete, as in the paper; `async-streamed` is async with
our streaming, a stronger baseline than the paper's. Async is run with every split in --async-cells and the fastest
counts. Wall time is that of the training phase: start-up is left out. Needs root (CPU quotas) and a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from benchmarks.modes_workload.deepen import deepen  # noqa: E402
from benchmarks.processor_shares import Share, cpu_seconds, share_name  # noqa: E402
from cli.history import open_stream  # noqa: E402
from cli.run_view import RunView  # noqa: E402
from shared import events as ev  # noqa: E402
from simulator.recorded import Recording  # noqa: E402

RUN_FILE = ROOT / "benchmarks" / "modes_workload" / "run.yaml"
SCHEDULES = {
    "elastic": {"mode": "elastic", "mu": 3, "phi": 0.5},
    "lookahead": {"mode": "lookahead", "mu": 3, "phi": 0.5},
    "async": {"mode": "async", "mu": 1, "phi": 1.5, "streaming": False},
    "async-streamed": {"mode": "async", "mu": 1, "phi": 1.5},
    "colocate": {"mode": "colocate", "mu": 4, "phi": 0.0, "streaming": False},
}
START_LIMIT_S = 600.0
RUN_LIMIT_S = 3600.0
POLL_S = 0.2


class RunBroke(RuntimeError):
    """A run of the comparison did not end well; the message has its last words."""


@dataclass
class Outcome:
    """One run. `busy`: processor time used by each cell over what its share allowed."""

    name: str
    async_cells: int
    wall_s: float
    steps: int
    mean_staleness: float
    busy: list[float]
    outside_cores: float  # used by everything that is no cell: harness, proxy, bus, evaluator, scheduler
    role_share: dict[str, float]  # of cell time
    trained_s: float  # seconds of micro-steps per step, summed over cells
    mean_execution_s: float
    longest_execution_s: float
    generated: int
    recorded: int
    moved_calls: int
    reward: float
    commits_s: list[float]  # after the start of training
    run_dir: str


class Shares:
    """Puts each cell agent of a run, with all that it starts, into its share; the limits come when training starts."""

    def __init__(self, cells: int, cores: float, run: subprocess.Popen[str]) -> None:
        self.shares = [Share(share_name(k)) for k in range(cells)]
        self.cores, self.run = cores, run
        self.known: dict[int, int] = {}  # cell -> its agent's pid

    def adopt(self) -> None:
        for process in psutil.Process(self.run.pid).children():
            line = process.cmdline()
            if "cell-agent" in line and "--cell" in line:
                cell = int(line[line.index("--cell") + 1])
                if self.known.get(cell) != process.pid:
                    self.known[cell] = process.pid
                    for one in (process, *process.children(recursive=True)):
                        self.shares[cell].add(one.pid)

    def limit(self) -> None:
        for share in self.shares:
            share.limit(self.cores)

    def used(self) -> list[float]:
        return [cpu_seconds(share.pids()) for share in self.shares]

    def used_outside(self) -> float:
        inside = {pid for share in self.shares for pid in share.pids()}
        family = [p.pid for p in psutil.Process(self.run.pid).children(recursive=True)]
        return cpu_seconds([self.run.pid, *(pid for pid in family if pid not in inside)])

    def close(self) -> None:
        for share in self.shares:
            share.close()


async def one_run(name: str, async_cells: int, args: argparse.Namespace, model: Path) -> Outcome:
    schedule = {f"scheduler.{k}": v for k, v in SCHEDULES[name].items()} | {
        "scheduler.async_training_cells": async_cells
    }
    settings = {
        "runs_dir": str(args.runs_dir),
        "name": f"modes-{name}-{async_cells}",
        "model.path": str(model),
        "seed": args.seed,
        "training.steps": args.steps,
        "cells.count": args.cells,
        **schedule,
        **dict(s.split("=", 1) for s in args.set),
    }
    command = [sys.executable, "-m", "cli.main", "up", str(RUN_FILE), "--json", "--quiet"]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value) if isinstance(value, bool) else value}"]
    log = open(args.runs_dir / f"{name}-{async_cells}.log", "w+")  # noqa: SIM115  (read again if the run breaks)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    shares = Shares(args.cells, args.share, process)
    try:
        folder = await _until_training(process, shares, settings["name"], args.runs_dir)
        shares.limit()
        before, outside, since = shares.used(), shares.used_outside(), time.monotonic()
        used, out_used, wall = before, outside, 0.0
        while process.poll() is None and not _training_is_over(folder):
            await asyncio.sleep(POLL_S)
            shares.adopt()
            now = shares.used()
            if all(
                a >= b for a, b in zip(now, used, strict=True)
            ):  # a cell that ended at the run's end counts as it was
                used, out_used, wall = now, max(out_used, shares.used_outside()), time.monotonic() - since
            if wall > RUN_LIMIT_S:
                raise RunBroke(f"{name} did not end within {RUN_LIMIT_S:.0f} s")
        stdout, _ = await asyncio.to_thread(process.communicate)
        if process.returncode:
            log.seek(0)
            raise RunBroke(f"{name}: gyre up ended with {process.returncode}: {log.read()[-2000:]}")
        summary = json.loads(stdout.splitlines()[-1])
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        shares.close()
        log.close()
    busy = [(b - a) / (wall * args.share) for a, b in zip(before, used, strict=True)]
    return await _outcome(name, async_cells, folder, summary, busy, (out_used - outside) / wall)


def _training_is_over(folder: Path) -> bool:
    return (folder / "policy").exists()


async def _until_training(process: subprocess.Popen[str], shares: Shares, name: str, runs: Path) -> Path:
    """The run's folder, once its training phase has begun."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        await asyncio.sleep(POLL_S)
        shares.adopt()
        folders = sorted(runs.glob(f"{name}-2*/nats.url"))
        if folders:
            folder = folders[-1].parent
            if await _has_begun(folder, shares):
                return folder
    raise RunBroke(f"{name} did not begin to train within {START_LIMIT_S:.0f} s, or ended before")


async def _has_begun(folder: Path, shares: Shares) -> bool:
    """Waits on the stream for the training phase, looking after the cells meanwhile."""
    from shared.bus import Bus

    bus = await Bus.connect((folder / "nats.url").read_text().strip(), folder.name, "control")

    async def seen() -> bool:
        async for stored in bus.read():
            if isinstance(stored.event, ev.RunPhaseChanged) and stored.event.phase in ("training", "failed"):
                return stored.event.phase == "training"
        return False

    reader = asyncio.create_task(seen())
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not reader.done() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            shares.adopt()
        return reader.done() and reader.result()
    finally:
        reader.cancel()
        await bus.close()


async def _outcome(
    name: str, async_cells: int, folder: Path, summary: dict[str, Any], busy: list[float], outside: float
) -> Outcome:
    view, recording = RunView(), Recording()
    async with open_stream(folder) as bus:
        async for stored in bus.read_until(await bus.last_sequence()):
            if stored.event is not None:
                view.apply(stored.event, stored.time)
                recording.apply(stored.event, stored.time)
    begin = recording.training_at
    end = next(at for at, phase in view.phases if phase == "eval_after")
    roles: dict[str, float] = defaultdict(float)
    for cell in view.cells.values():
        until = [at for at, _ in cell.history[1:]] + [end]
        for (since, role), at in zip(cell.history, until, strict=True):
            roles[role] += max(0.0, min(at, end) - max(since, begin))
    total = sum(roles.values())
    lives = [seconds for group in recording.lives.values() for seconds in group.values()]
    steps = summary["steps"]
    tokens = summary["tokens"]
    return Outcome(
        name=name,
        async_cells=async_cells if "async" in name else 0,
        wall_s=round(end - begin, 2),
        steps=steps,
        mean_staleness=round(summary["mean_staleness"], 3),
        busy=[round(b, 3) for b in busy],
        outside_cores=round(outside, 3),
        role_share={k: round(v / total, 3) for k, v in sorted(roles.items()) if v},
        trained_s=round(sum(recording.trained.values()) / steps, 2),
        mean_execution_s=round(sum(lives) / len(lives), 2),
        longest_execution_s=round(max(lives), 2),
        generated=tokens["generated"],
        recorded=tokens["recorded"],
        moved_calls=summary["moved_calls"]["cut"],
        reward=round(summary["reward_last_quarter"] or 0.0, 3),
        commits_s=[round(at - begin, 1) for at in recording.committed_at],
        run_dir=str(folder),
    )


def report(outcomes: list[Outcome]) -> dict[str, Any]:
    """Ratios against elastic; a mode with several splits counts with its fastest."""
    best: dict[str, Outcome] = {}
    for one in outcomes:
        if one.name not in best or one.wall_s < best[one.name].wall_s:
            best[one.name] = one
    out: dict[str, Any] = {"runs": [asdict(o) for o in outcomes]}
    out |= {f"wall_s_{name.replace('-', '_')}": one.wall_s for name, one in best.items()}
    if elastic := best.get("elastic"):
        for name, one in best.items():
            if name != "elastic":
                out[f"speedup_vs_{name.replace('-', '_')}"] = round(one.wall_s / elastic.wall_s, 3)
    return out


def table(outcomes: list[Outcome]) -> str:
    lines = ["mode             split  wall s  staleness  cells busy  outside  role shares"]
    for o in outcomes:
        mean = sum(o.busy) / len(o.busy)
        roles = " ".join(f"{k} {v:.2f}" for k, v in o.role_share.items())
        lines.append(
            f"{o.name:16} {o.async_cells or '-':>5} {o.wall_s:7.1f} {o.mean_staleness:10.2f} {mean:11.2f} "
            f"{o.outside_cores:8.2f}  {roles}"
        )
    return "\n".join(lines)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--modes", default="elastic,async,colocate", help=f"of {', '.join(SCHEDULES)}")
    parser.add_argument("--async-cells", default="1,2", help="splits of async that are tried")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.4, help="cores per cell")
    parser.add_argument("--deeper", type=int, default=6, help="layers of the policy, times the example's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--set", action="append", default=[], help="any run-file key, for all modes")
    args = parser.parse_args()
    unknown = set(args.modes.split(",")) - set(SCHEDULES)
    if unknown:
        parser.error(f"no such mode: {', '.join(sorted(unknown))}")
    args.runs_dir = args.runs_dir.resolve()
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    if load > 1.0:
        print(f"the machine is not quiet (load {load:.1f}): times will be too long", file=sys.stderr)
    model = deepen(ROOT / "examples" / "minirepo" / "model", args.runs_dir / "deeper-model", args.deeper)
    outcomes: list[Outcome] = []
    for name in args.modes.split(","):
        for split in map(int, args.async_cells.split(",")) if "async" in name else (1,):
            outcomes.append(await one_run(name, split, args, model))
            print(table(outcomes[-1:]), file=sys.stderr)
    print(table(outcomes), file=sys.stderr if args.json else sys.stdout)
    result = report(outcomes) | {"load_before": round(load, 1), "share": args.share, "cells": args.cells}
    if args.json:
        print(json.dumps(result))
    else:
        print({k: v for k, v in result.items() if k.startswith(("speedup", "wall"))})


if __name__ == "__main__":
    asyncio.run(main())
