"""The processes of a run on one machine, by the part they are: looked up ahead, so that a strike need not search."""

from __future__ import annotations

import contextlib
import os
import re

import psutil

CELL = re.compile(r"--cell (\d+)")
SERVE = re.compile(r"cli\.main serve ([a-z-]+)")


class Processes:
    """`parts`: name -> pids, e.g. "proxy", "nats-server", "cell-agent-0", "trainer-0", "engine-0" (all of its
    processes) and "memory-0" (those of them that hold KV pages). `family`: every process ever seen, with its start."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.parts: dict[str, list[int]] = {}
        self.family: dict[int, float] = {}

    def look(self) -> None:
        found: dict[str, list[int]] = {}
        agents: dict[int, str] = {}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.root).children(recursive=True):  # parents come before their children
                with contextlib.suppress(psutil.Error):
                    with process.oneshot():
                        line, parent = " ".join(process.cmdline()), process.ppid()
                        self.family[process.pid] = process.create_time()
                    for part in parts_of(line, agents.get(parent, "")):
                        found.setdefault(part, []).append(process.pid)
                    cell = CELL.search(line)
                    if "serve cell-agent" in line and cell:
                        agents[process.pid] = cell[1]
                    elif parent in agents:
                        agents[process.pid] = agents[parent]
        self.parts = found

    def left(self) -> list[int]:
        """Processes of the family that still run."""
        return [pid for pid, started in self.family.items() if _runs(pid, started)]


def parts_of(line: str, cell: str) -> list[str]:
    """What a process with this command line is; `cell`: of the agent that it descends from, or ""."""
    if served := SERVE.search(line):
        number = CELL.search(line)
        return [f"cell-agent-{number[1]}" if number else served[1]]
    if "nats-server" in line:
        return ["nats-server"]
    if ("trainer.worker" in line or "cell_agent.receiver" in line) and cell:
        return [f"trainer-{cell}"]
    if cell and "sglang::" in line:
        return [f"engine-{cell}", f"memory-{cell}"] if "scheduler" in line else [f"engine-{cell}"]
    return [f"engine-{cell}"] if cell and "engine.launch" in line else []


def signal_all(pids: list[int], number: int) -> list[int]:
    """Those that the signal reached."""
    reached = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached.append(pid)
    return reached


def _runs(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
