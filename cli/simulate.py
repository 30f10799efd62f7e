"""`gyre simulate` and `gyre plan`: thin calls into simulator/."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.usage import UsageError

MODES = ("elastic", "async", "colocate", "lookahead")


def simulate(
    what: Annotated[str, typer.Argument(help="Preset (see docs/simulator.md), simulation file or run file.")] = "",
    mode: Annotated[str, typer.Option(help="elastic, async, colocate, lookahead or all.")] = "all",
    staleness: Annotated[float, typer.Option(help="Target mean scheduling staleness.")] = 1.5,
    seeds: Annotated[int, typer.Option(min=1, help="Average over so many seeds.")] = 1,
    from_run: Annotated[str | None, typer.Option(help="Calibrate on a recorded run (id, folder, or latest).")] = None,
    mu: Annotated[int | None, typer.Option(min=1, help="With --from-run: steps of a burst.")] = None,
    phi: Annotated[float | None, typer.Option(min=0, help="With --from-run: extra dispatch, in batches.")] = None,
    train_cells: Annotated[int | None, typer.Option(min=1, help="With --from-run: async's training cells.")] = None,
    streaming: Annotated[bool | None, typer.Option(help="With --from-run: train groups as they become ready.")] = None,
    durations: Annotated[Path | None, typer.Option(help="Trace: JSON lines with group and hours or seconds.")] = None,
    train_hours: Annotated[float | None, typer.Option(help="Cell-hours of training per batch.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the modes' role timelines into this PNG.")] = None,
    write_page: Annotated[Path | None, typer.Option(help="Write docs/simulator.md and its pictures (minutes).")] = None,
) -> None:
    """Simulate a schedule in virtual time, with the scheduler's own core: how long, how stale, how idle."""
    from simulator import study
    from simulator.files import BadSetup, read_setup
    from simulator.page import write
    from simulator.presets import PRESETS

    if write_page:
        write(write_page, seeds=seeds, say=lambda text: print(text, flush=True))
        return
    if mode != "all" and mode not in MODES:
        raise UsageError(f"--mode {mode}: choose one of {', '.join(MODES)}, all")
    if staleness < 0:
        raise UsageError("--staleness must be 0 or more")
    modes, numbers = MODES if mode == "all" else (mode,), list(range(seeds))
    if from_run:
        given = {"mu": mu, "phi": phi, "async_cells": train_cells, "streamed": streaming}
        changes = {key: value for key, value in given.items() if value is not None}
        _print(_from_run(from_run, modes, numbers, changes), json_)
        return
    if what == "ablation":
        _print(study.ablation(numbers), json_)
        return
    if what in PRESETS:
        setup = PRESETS[what].setup
    elif Path(what).is_file():
        try:
            setup = read_setup(Path(what), durations, train_hours)
        except BadSetup as error:
            raise UsageError(str(error)) from error
    else:
        raise UsageError(f"no preset and no file {what!r}; presets: {', '.join(PRESETS)}, ablation")
    _print(study.compare(what, setup, staleness, modes, numbers), json_)
    if plot:
        _plot(plot, setup, modes, staleness)


def _plot(path: Path, setup: Any, modes: tuple[str, ...], staleness: float) -> None:
    from simulator.pictures import draw_roles
    from simulator.presets import schedule
    from simulator.study import best_split

    named = []
    for mode in modes:
        scheduled = schedule(replace(setup, steps=min(setup.steps, 12)), mode, staleness)
        if mode == "async":
            scheduled = replace(scheduled, async_cells=best_split(scheduled, 0))
        named.append((mode, scheduled))
    draw_roles(named, path)


def _from_run(run: str, modes: tuple[str, ...], seeds: list[int], changes: dict[str, Any]) -> dict[str, Any]:
    from cli.history import find_run, open_stream
    from simulator.files import BadSetup
    from simulator.recorded import Recording
    from simulator.study import compare_recorded

    folder, recording = find_run(run), Recording()

    async def collect() -> None:
        async with open_stream(folder) as bus:
            async for stored in bus.read_until(await bus.last_sequence()):
                if stored.event is not None:
                    recording.apply(stored.event, stored.time)

    asyncio.run(collect())
    try:
        return compare_recorded(folder.name, recording, modes, seeds, changes)
    except BadSetup as error:
        raise UsageError(str(error)) from error


def plan(
    gpus: Annotated[int, typer.Option(help="Accelerators in all.")],
    model_params: Annotated[float, typer.Option(help="Parameters of the model, e.g. 122e9.")],
    durations: Annotated[Path | None, typer.Option(help="Trace: JSON lines with group and hours or seconds.")] = None,
    gpu: Annotated[str, typer.Option(help="a100, h100, h200, b200 or mi300x.")] = "h200",
    active_params: Annotated[float, typer.Option(help="Parameters active per token (0: all).")] = 0.0,
    tokens: Annotated[float, typer.Option(help="Tokens computed in training per execution.")] = 1e6,
    mfu: Annotated[float, typer.Option(help="Share of the peak that training reaches.")] = 0.15,
    train_gpu_hours: Annotated[float, typer.Option(help="GPU-hours of training per batch, if measured.")] = 0.0,
    places_per_gpu: Annotated[float, typer.Option(help="Executions that one accelerator serves at once.")] = 6.0,
    groups: Annotated[int, typer.Option(help="B: groups per training step.")] = 32,
    executions: Annotated[int, typer.Option(help="N: executions per group.")] = 16,
    staleness: Annotated[float, typer.Option(help="Target mean scheduling staleness.")] = 1.5,
    steps: Annotated[int, typer.Option(help="Steps to simulate.")] = 12,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Propose cells, split, mu and phi for a cluster, with expected hours per step and what limits them."""
    from simulator.files import BadSetup, read_trace
    from simulator.planner import GPUS, NoPlan, Wish
    from simulator.planner import plan as make
    from simulator.presets import NL2REPO

    if gpu not in GPUS:
        raise UsageError(f"--gpu {gpu}: choose one of {', '.join(GPUS)}")
    if min(gpus, groups, executions, steps) < 1 or model_params <= 0:
        raise UsageError("--gpus, --groups, --executions, --steps and --model-params must be positive")
    try:
        law = read_trace(durations) if durations else NL2REPO
    except BadSetup as error:
        raise UsageError(str(error)) from error
    wish = Wish(
        gpus=gpus, gpu=gpu, parameters=model_params, durations=law, active=active_params, tokens=tokens, mfu=mfu,
        places_per_gpu=places_per_gpu, groups=groups, executions=executions, steps=steps, staleness=staleness,
        train_hours=train_gpu_hours,
    )  # fmt: skip
    try:
        answer = make(wish)
    except NoPlan as error:
        raise UsageError(str(error)) from error
    if not durations:
        answer["durations"] = "none given: NL2RepoBench with 122B assumed"
    _print(answer, json_)


def _print(plain: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(plain))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for key, value in plain.items():
        rows = list(value.values()) if isinstance(value, dict) else value
        if not (isinstance(rows, list) and rows and all(isinstance(r, dict) for r in rows)):
            console.print(f"[bold]{key}[/]  {value}")
            continue
        table = Table(title=key, title_justify="left", box=None)
        names = list(value) if isinstance(value, dict) else [""] * len(rows)
        columns = list(dict.fromkeys(c for r in rows for c in r))
        for column in ["", *columns]:
            table.add_column(column)
        for name, row in zip(names, rows, strict=True):
            table.add_row(name, *("" if c not in row else f"{row[c]}" for c in columns))
        console.print(table)
