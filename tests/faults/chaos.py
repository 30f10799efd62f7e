"""The fault matrix: kill -9 (or stop) every part at every step of a hand-over and of a join, in real runs.

    python -m tests.faults.chaos [--only WORD ...] [--per-run N] [--monkey N --seed S] [--json FILE] [--list]

Cases share runs, `--per-run` at a time; each run is audited when it has ended (audit.py). A case passes if its signal
hit the step, every cell came back, and the run's books are right. `make chaos` runs everything (hours on two cores).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cli.history import open_stream
from shared.events import Event
from tests.faults.audit import audit
from tests.faults.live_run import LiveRun, live_run
from tests.faults.matrix import SIGNALS, STEPS, VICTIMS, Case, matrix
from tests.faults.striker import Strike, Striker

CELLS, GROUPS, MEMBERS = 3, 4, 4
STEPS_PER_CASE = 4
GONE_S = 10.0
AFTER_S = 420.0  # a run without strikes ends within so long on a busy machine, and then the rest of its steps


@dataclass
class RunResult:
    strikes: list[Strike]
    problems: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    folder: str = ""

    @property
    def passed(self) -> bool:
        return not self.problems


def settings(steps: int, cells: int, **more: object) -> dict[str, object]:
    """With three cells the core and a satellite leave with live calls, both to cell 2; with two only the core does.
    Small micro-steps, so that satellites train, too; small learning rate, so that the policy goes on making calls."""
    return {
        "training.steps": steps,
        "training.learning_rate": 1e-5,
        "training.micro_step_tokens": 512,
        "scheduler.groups_per_batch": GROUPS,
        "scheduler.executions_per_group": MEMBERS,
        "scheduler.mu": 1,
        "scheduler.phi": 1.0,
        "scheduler.supply_fraction": 0.25,
        "scheduler.supply_hold_s": 0.1,
        "cells.count": cells,
        "cells.capacity": 2 * GROUPS * MEMBERS // cells + 1,
        "cells.engine_tokens": 16384,
        "evaluation.main": '""',
        "evaluation.sets": "[]",
        "execution.overall_budget_s": 900,
        **more,
    }


async def run_cases(folder: Path, cases: list[Case], steps: int = 0, cells: int = CELLS, **more: object) -> RunResult:
    """One run with these strikes, and its audit."""
    steps = steps or 1 + STEPS_PER_CASE * len(cases)
    began = time.monotonic()
    async with live_run(folder, **settings(steps, cells, **more)) as run:
        async with Striker(run, cells, steps) as striker:
            await striker.strike(cases)
            await striker.finish(AFTER_S)
            problems = await _end(run)
        striker.processes.look()
    events = await _history(run)
    parts = tuple(s.part for s in striker.strikes if s.part)
    books = audit(events, steps=steps, executions=steps * GROUPS * MEMBERS, struck=parts)
    problems += books.problems + _rest_problems(striker)
    deadline = time.monotonic() + GONE_S
    while (left := striker.processes.left()) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)  # what was killed last is not gone at once
    if left:
        problems.append(f"processes are left: {left}")
    problems += [
        f"{s.case}: a cell did not come back"
        for s in striker.strikes
        if _struck(s) and s.recovered_s < 0 and not s.run_over
    ]
    seconds = round(time.monotonic() - began, 1)
    return RunResult(striker.strikes, problems, books.facts, seconds, str(run.folder))


def _struck(strike: Strike) -> bool:
    return strike.outcome == "struck"


async def _end(run: LiveRun) -> list[str]:
    """Wait for the process; what its end says against the run."""
    try:
        async with asyncio.timeout(AFTER_S):
            while run.process.poll() is None:
                await asyncio.sleep(0.2)
    except TimeoutError:
        return ["the run did not end"]
    code = run.process.returncode
    return [] if code == 0 else [f"gyre up ended with code {code}: {run.log.read_text()[-800:]}"]


def _rest_problems(striker: Striker) -> list[str]:
    if not striker.rest:
        return ["no engine was asked whether it is at rest: the last commit was not seen"]
    held = {k: s for k, s in striker.rest.items() if isinstance(s, str) or not s.at_rest}
    return [f"engine {k} is not at rest: {s}" for k, s in held.items()]


async def _history(run: LiveRun) -> list[Event]:
    async with open_stream(run.folder) as bus:
        messages = bus.read_until(await bus.last_sequence())
        return [m.event async for m in messages if m.event is not None]


# ----------------------------------------------------------------------------------------------------------- command


def chosen(only: list[str], monkey: int, seed: int) -> list[Case]:
    cases = [case for case in matrix() if not only or any(word in case.name for word in only)]
    rng = random.Random(seed)
    if monkey:
        return [rng.choice(cases) for _ in range(monkey)]
    rng.shuffle(cases)  # neighbours in a run should differ
    return cases


def table(results: list[RunResult]) -> str:
    rows = [f"{'case':44} {'hit':>4} {'late ms':>8} {'back s':>7}  run"]
    for result in results:
        for s in result.strikes:
            hit, run = ("yes" if _struck(s) else "no"), ("ok" if result.passed else "FAILED")
            tail = "" if _struck(s) else f" ({s.outcome})"
            rows.append(f"{s.case:44} {hit:>4} {1000 * s.late_s:8.1f} {s.recovered_s:7.1f}  {run}{tail}")
    for result in results:
        rows += [f"! {result.folder}: {problem}" for problem in result.problems]
    struck = sum(_struck(s) for r in results for s in r.strikes)
    asked = sum(len(r.strikes) for r in results)
    rows.append(f"{struck} of {asked} struck, {sum(r.passed for r in results)} of {len(results)} runs in order")
    return "\n".join(rows)


def report(results: list[RunResult], path: str) -> None:
    text = json.dumps([asdict(r) | {"passed": r.passed} for r in results], indent=1)
    if path == "-":
        print(text)
    elif path:
        Path(path).write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name STEP/VICTIM/SIGNAL has one of these")
    parser.add_argument("--case", nargs="*", default=[], help="these, by their whole names, in this order")
    parser.add_argument("--per-run", type=int, default=6, help="cases in one run (1: each alone)")
    parser.add_argument("--cells", type=int, default=CELLS, help="2: cheaper, but no satellite has calls to hand over")
    parser.add_argument("--monkey", type=int, default=0, help="so many cases at random instead of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="file for the results, - for standard output")
    parser.add_argument("--keep", default="", help="folder for the runs' folders; those of runs in order are removed")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    cases = [Case.of(n) for n in options.case] or chosen(options.only, options.monkey, options.seed)
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if not cases:
        parser.error(f"no case has {options.only}; steps {[*STEPS]}, victims {[*VICTIMS]}, signals {[*SIGNALS]}")
    keep = Path(options.keep or tempfile.mkdtemp(prefix="gyre-chaos-")).resolve()
    results = []
    for first in range(0, len(cases), options.per_run):
        folder = keep / f"{first:03d}-{time.strftime('%H%M%S')}"
        folder.mkdir(parents=True)
        results.append(asyncio.run(run_cases(folder, cases[first : first + options.per_run], cells=options.cells)))
        print(table(results[-1:]), file=sys.stderr, flush=True)
        if results[-1].passed:
            shutil.rmtree(folder)
        report(results, options.json if options.json != "-" else "")
    report(results, options.json)
    print(table(results))
    return 0 if all(r.passed and all(map(_struck, r.strikes)) for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
