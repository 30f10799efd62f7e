"""Reading a run's stream for people: attach to the run's server, or start one on its files if the run is over."""

from __future__ import annotations

import fcntl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cli.run_view import RunView
from shared.bus import Bus
from shared.nats_server import start_server


class NoSuchRun(ValueError):
    """No folder of that name under the runs folder."""


def find_run(run: str, runs_dir: Path = Path("runs")) -> Path:
    """The folder of a run, given by id or by path; `latest` is the newest."""
    if run == "latest":
        folders = sorted((p for p in runs_dir.glob("*/nats")), key=lambda p: p.stat().st_mtime)
        if not folders:
            raise NoSuchRun(f"no runs in {runs_dir.resolve()}: start one with `gyre up RUNFILE`")
        return folders[-1].parent.resolve()
    for folder in (Path(run), runs_dir / run):
        if (folder / "nats").is_dir():
            return folder.resolve()
    known = ", ".join(sorted(p.parent.name for p in runs_dir.glob("*/nats"))[-5:]) or "none"
    raise NoSuchRun(f"no run {run!r} in {runs_dir.resolve()} (newest known: {known})")


def is_driven(folder: Path) -> bool:
    """Whether a `gyre up` holds the run; one that was killed leaves its nats.url behind, but not its lock."""
    with open(folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


async def view_of(bus: Bus) -> RunView:
    """The run as its whole stream tells it."""
    view = RunView()
    async for stored in bus.read_until(await bus.last_sequence()):
        if stored.event is not None:
            view.apply(stored.event, stored.time)
    return view


@asynccontextmanager
async def open_stream(folder: Path) -> AsyncIterator[Bus]:
    """A connection to the run's stream. A live run's server is used; else one is started on the run's files."""
    url_file = folder / "nats.url"
    if url_file.exists() and is_driven(folder):
        bus = await Bus.connect(url_file.read_text().strip(), folder.name, "control")
        try:
            yield bus
        finally:
            await bus.close()
        return
    server = start_server(folder / "nats")
    try:
        bus = await Bus.connect(server.url, folder.name, "control")
        try:
            yield bus
        finally:
            await bus.close()
    finally:
        server.stop()
