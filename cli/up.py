"""`gyre up`: start a run (or resume one), show it, end it in order, leave the report.

Invariant: on every way out (finished, failed, Ctrl-C) the processes are gone, the stream is whole on disk, and the
user is told what happened and how to go on.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from cli import preflight
from cli.history import view_of
from cli.live_view import Display
from cli.report import print_summary, write_all
from cli.run_view import RunView
from cli.summary import summarize
from deploy.local import LocalRun, RunFailed
from shared.config import RunConfig, from_plain, to_plain
from shared.events import RunPhaseChanged, RunResumed, RunStarted, StopRequested
from shared.tasks import load_folder

EXPORT_GRACE_S = 60.0
HOPELESS_STARTS = 3


class NoTasks(ValueError):
    """A task folder without a single usable task."""


@dataclass(frozen=True)
class Options:
    json: bool = False
    quiet: bool = False


def usable_tasks(folder: str, what: str, console: Console) -> tuple[str, ...]:
    """Paths of the good tasks in `folder`; broken ones are named and left out."""
    tasks, broken = load_folder(Path(folder))
    for bad in broken:
        console.print(f"left out: {bad}", style="yellow", markup=False)
    if not tasks:
        raise NoTasks(f"{what}: no usable task in {folder} (each needs task.toml, instruction.md and tests/test.sh)")
    return tuple(str(t.folder) for t in tasks)


def first_event(config: RunConfig, run: str, folder: Path, console: Console) -> RunStarted:
    train = usable_tasks(config.tasks.train, "tasks.train", console)
    if config.tasks.limit:
        train = train[: config.tasks.limit]
    sets = {s.name: usable_tasks(s.tasks, f"evaluation set {s.name}", console) for s in config.evaluation.sets}
    return RunStarted(
        run=run,
        config=to_plain(config),
        run_dir=str(folder),
        train_tasks=train,
        eval_tasks=sets,
        started_at=time.time(),
    )


async def start(config: RunConfig, options: Options) -> int:
    """Start a new run and see it through. Returns the exit code."""
    console = Console(stderr=True)
    run = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = (Path(config.runs_dir) / run).resolve()
    await preflight.check(config, console)
    first = first_event(config, run, folder, console)
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(to_plain(config), sort_keys=False))
    if not options.quiet:
        console.print(f"run {run} in {folder}", markup=False)
    async with LocalRun(config, run, folder) as local:
        assert local.bus is not None
        await local.bus.publish(first, msg_id="run-started")
        return await _drive(local, options, console)


async def resume(folder: Path, options: Options) -> int:
    """Go on with a stopped run from the last committed step; what was in flight is redelivered."""
    console = Console(stderr=True)
    console.print(f"going on with {folder.name}", markup=False)
    config = from_plain(yaml.safe_load((folder / "run.yaml").read_text()))
    async with LocalRun(config, folder.name, folder) as local:
        assert local.bus is not None
        view = await view_of(local.bus)
        if view.phase == "finished":
            console.print(f"{folder.name} is finished: nothing to resume. `gyre report {folder.name}` shows it.")
            return 0
        await local.bus.publish(RunResumed(resumed_at=time.time()))
        return await _drive(local, options, console)


async def _drive(local: LocalRun, options: Options, console: Console) -> int:
    assert local.bus is not None
    started = time.monotonic()
    view, interrupted = RunView(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, interrupted.set)
    local.start_services()
    reader = asyncio.create_task(_follow(local, view))
    try:
        with Display(view, quiet=options.quiet) as display:
            while not (interrupted.is_set() or local.failed or _over(view)):
                if reader.done():
                    reader.result()
                local.failed = local.failed or _hopeless(view)
                await asyncio.sleep(0.3)
                display.refresh()
    finally:
        if interrupted.is_set() and not local.server_gone:
            await local.bus.publish(StopRequested(reason="interrupted"))
        if local.failed and not local.server_gone:
            await local.bus.publish(RunPhaseChanged(phase="failed", reason=local.failed))
        await local.stop_services()
        reader.cancel()
    if local.server_gone:
        raise RunFailed(f"{local.failed}\nThe stream is whole on disk: gyre up --resume {local.run}")
    view = await view_of(local.bus)  # again from the whole stream, with what the services said while they stopped
    summary = summarize(view, wall_s=time.monotonic() - started, peak_rss_bytes=local.peak_rss)
    files = write_all(view, summary, local.folder)
    return _say(local, view, summary, files, options, console, interrupted=interrupted.is_set())


def _hopeless(view: RunView) -> str | None:
    """A cell that keeps failing before the run has begun will not get up: say why, with its log."""
    bad = [cell for cell, count in view.failed_starts.items() if count >= HOPELESS_STARTS]
    if view.phase != "starting" or not bad:
        return None
    return f"cell {bad[0]} failed {HOPELESS_STARTS} starts. Its log ends:\n{view.failure_log}"


def _over(view: RunView) -> bool:
    """Failed; or finished, with the policy on disk (a core that was lost at the very end gets time to write it)."""
    late = view.phases and time.time() > view.phases[-1][0] + EXPORT_GRACE_S
    return view.phase == "failed" or (view.phase == "finished" and bool(view.policy_path or late))


async def _follow(local: LocalRun, view: RunView) -> None:
    assert local.bus is not None
    async for stored in local.bus.read():
        if stored.event is not None:
            view.apply(stored.event, stored.time)


def _say(
    local: LocalRun,
    view: RunView,
    summary: dict[str, Any],
    files: dict[str, Path],
    options: Options,
    console: Console,
    *,
    interrupted: bool,
) -> int:
    import json

    if not options.quiet:
        print_summary(summary, console, files)
    if options.json:
        print(json.dumps(summary), flush=True)
    if local.failed or view.phase == "failed":
        raise RunFailed(local.failed or view.phase_reason)
    if interrupted:
        console.print(f"stopped. Go on with: gyre up --resume {local.run}", markup=False)
        return 130
    if not options.quiet:
        console.print(
            f"look next: gyre events {local.run} | gyre tree {local.run} EXECUTION | tensorboard --logdir "
            f"{local.folder / 'tensorboard'} | docs/operations.md",
            markup=False,
        )
    return 0
