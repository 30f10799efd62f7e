"""A real `gyre up` in a process of its own, and the means to hurt it at chosen moments of its stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shared.bus import Bus, Stored
from shared.events import Event, RunPhaseChanged

ROOT = Path(__file__).parent.parent.parent


def settings(tmp: Path, **more: object) -> dict[str, object]:
    """A run of a minute: two cells, small groups, one small evaluation set."""
    eval_set = f"[{{name: eval, tasks: {ROOT}/examples/minirepo/tasks/eval, executions: 4}}]"
    return {
        "runs_dir": tmp,
        "training.steps": 3,
        "scheduler.groups_per_batch": 3,
        "scheduler.executions_per_group": 4,
        "scheduler.mu": 1,
        "scheduler.phi": 1.0,
        "cells.count": 2,
        "cells.capacity": 12,
        "cells.engine_tokens": 16384,
        "cells.handover": "pages",  # a model this small computes most prefixes sooner than it moves them
        "evaluation.main": "eval",
        "evaluation.sets": eval_set,
        **more,
    }


@dataclass
class LiveRun:
    process: subprocess.Popen[str]
    folder: Path
    bus: Bus
    log: Path
    seen: list[Event] = field(default_factory=list)
    family: set[int] = field(default_factory=set)

    async def until(self, happened: Callable[[Event], bool], limit_s: float = 120.0) -> Event:
        """The next event (after those seen) for which `happened`; fails if the run ends or the limit passes."""
        async with asyncio.timeout(limit_s):
            async for stored in self._read():
                if stored.event is None:
                    continue
                self.seen.append(stored.event)
                if happened(stored.event):
                    return stored.event
                over = isinstance(stored.event, RunPhaseChanged) and stored.event.phase in ("finished", "failed")
                assert not over, f"the run is over: {stored.event}"
        raise AssertionError("unreachable")

    async def _read(self) -> AsyncIterator[Stored]:
        async for stored in self.bus.read(len(self.seen) + 1):
            yield stored

    def pids(self, *words: str) -> list[int]:
        """Processes of the run whose command line has all words."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if all(word in line for word in words):
                found.append(process.pid)
        return found

    def kill(self, *words: str, signum: int = signal.SIGKILL) -> None:
        pids = self.pids(*words)
        assert pids, f"no process with {words}"
        for pid in pids:
            os.kill(pid, signum)

    def note_family(self) -> None:
        self.family |= {p.pid for p in psutil.Process(self.process.pid).children(recursive=True)}

    async def end(self, limit_s: float = 240.0) -> dict[str, Any]:
        """Wait for the end; the summary. Asserts that no process of the run is left."""
        self.note_family()
        async with asyncio.timeout(limit_s):
            while self.process.poll() is None:
                await asyncio.sleep(0.2)
        out = self.process.stdout.read() if self.process.stdout else ""
        assert self.process.returncode == 0, self.log.read_text()[-6000:]
        left = [p for p in self.family if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        assert left == []
        return dict(json.loads(out.strip().splitlines()[-1]))


@asynccontextmanager
async def live_run(tmp: Path, **more: object) -> AsyncIterator[LiveRun]:
    """Starts the run and connects to its stream; kills what is left at the end."""
    options = [x for k, v in settings(tmp, **more).items() for x in ("--set", f"{k}={v}")]
    run_file = ROOT / "examples" / "minirepo" / "run.yaml"
    log = tmp / "gyre.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "up", str(run_file), "--json", *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        while not (found := list(tmp.glob("*/nats.url"))):
            assert process.poll() is None, log.read_text()[-3000:]
            await asyncio.sleep(0.1)
        folder = found[0].parent
        bus = await Bus.connect(found[0].read_text().strip(), folder.name, "control")
        try:
            yield LiveRun(process, folder, bus, log)
        finally:
            await bus.close()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(25)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def books_balance(summary: dict[str, Any], *, steps: int, batch: int, evaluated: int) -> None:
    """Every execution is accounted for and every group's executions were trained once."""
    counts = summary["executions"]
    assert summary["phase"] == "finished"
    assert summary["steps"] == steps
    assert counts["outstanding"] == 0
    assert counts["dispatched"] == counts["finished"] == steps * batch + evaluated
    assert counts["trained"] + counts["evaluated"] + counts["excluded"] == counts["finished"]


def trained_once(events: list[Event]) -> None:
    """No micro-step in two commits, no group in two batches."""
    from shared.events import BatchCommitted, GroupAssigned

    steps = Counter(m for e in events if isinstance(e, BatchCommitted) for m in e.micro_steps)
    groups = Counter(e.group for e in events if isinstance(e, GroupAssigned))
    assert not [m for m, n in (steps | groups).items() if n > 1]
