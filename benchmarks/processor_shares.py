"""A fixed share of the processor for each cell of a local run: its agent, engine and trainer together, in one cgroup.

On a cluster a cell is a unit of hardware: what it does not use, no other cell can. On one machine the cells' processes
would borrow from each other, and an idle cell would make the others faster. A CPU quota takes that away.
Needs root and the cpu controller (cgroup v1 or v2).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000  # short against a decode step, so that a cell is slow rather than stopping and starting


class NoQuota(RuntimeError):
    """This machine gives no CPU quotas; the message says what is missing."""


class Share:
    """One cgroup. `limit` may be set and changed while its processes run."""

    def __init__(self, name: str) -> None:
        self.v2 = (ROOT / "cgroup.controllers").exists()
        parent = ROOT if self.v2 else ROOT / "cpu"
        self.folder = parent / name
        try:
            if self.v2:
                (parent / "cgroup.subtree_control").write_text("+cpu")
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise NoQuota(
                f"no cgroup can be made in {parent} ({error}): run as root, with the cpu controller"
            ) from error

    def add(self, pid: int) -> None:
        """The process and all its threads; what it starts from now on belongs here too."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def limit(self, cores: float) -> None:
        if self.v2:
            (self.folder / "cpu.max").write_text(f"{int(cores * PERIOD_US)} {PERIOD_US}")
        else:
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.folder / "cpu.cfs_quota_us").write_text(str(int(cores * PERIOD_US)))

    def pids(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]
        return []

    def close(self) -> None:
        with contextlib.suppress(OSError):  # processes that are still ending keep it; it is empty and harmless then
            self.folder.rmdir()


def cpu_seconds(pids: list[int]) -> float:
    """Processor time of these processes so far, in seconds."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def share_name(cell: int) -> str:
    return f"gyre-modes-{os.getpid()}-{cell}"
