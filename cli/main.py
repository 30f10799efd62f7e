"""`gyre`: the one command. Each sub-command is a thin call into the part that does the work; imports are lazy so that
a service process loads only what it needs."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import simulate as simulator_commands
from cli.usage import UsageError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Elastic reinforcement learning of hours-long coding agents.",
)

SERVICES = {
    "scheduler": "services.scheduler.service",
    "cell-agent": "services.cell_agent.service",
    "proxy": "services.proxy.service",
    "trajectory": "services.trajectory.service",
    "evaluator": "services.evaluator.service",
    "harness": "services.harness.service",
}


def _overrides(settings: list[str]) -> dict[str, Any]:
    """`--set a.b=value` with values as in the run file."""
    import yaml

    from shared.config_check import parse_value

    out: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {setting!r}: write it as key=value, e.g. --set training.steps=4")
        try:
            out[key] = parse_value(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {setting!r}: the value is no YAML: {error}") from error
    return out


@app.command()
def up(
    run_file: Annotated[Path | None, typer.Argument(help="The run file (YAML).")] = None,
    mode: Annotated[str | None, typer.Option(help="elastic, async, colocate, lookahead; else the run file's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps (instead of the run file's).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed (instead of the run file's).")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any run-file key: --set key.sub=value.")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with a stopped run (id or folder, or `latest`).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
    quiet: Annotated[bool, typer.Option(help="No live view, no summary.")] = False,
) -> None:
    """Train: start nats-server and all services of a run on this machine, and show what happens."""
    from cli import up as runner
    from cli.history import find_run
    from shared.config import load

    options = runner.Options(json=json_, quiet=quiet)
    if resume:
        raise typer.Exit(asyncio.run(runner.resume(find_run(resume), options)))
    if run_file is None:
        raise UsageError("which run file? e.g. gyre up examples/minirepo/run.yaml")
    overrides = _overrides(set_ or [])
    given = {"scheduler.mode": mode, "training.steps": steps, "seed": seed}
    overrides |= {k: v for k, v in given.items() if v is not None}
    raise typer.Exit(asyncio.run(runner.start(load(run_file, overrides), options)))


@app.command()
def serve(
    name: Annotated[str, typer.Argument(help="One of: " + ", ".join(SERVICES))],
    nats: Annotated[str, typer.Option(help="Address of the NATS server, e.g. nats://127.0.0.1:4222.")],
    run: Annotated[str, typer.Option(help="Run id.")],
    cell: Annotated[int | None, typer.Option(help="cell-agent only: number of the cell, 0 is the core.")] = None,
) -> None:
    """Run one service alone against a NATS server; it reads its configuration from the run's first event."""
    import importlib

    from shared.service import run_service

    if name not in SERVICES:
        raise UsageError(f"no service {name!r}: choose one of {', '.join(SERVICES)}")
    if (name == "cell-agent") != (cell is not None):
        raise UsageError("cell-agent needs --cell NUMBER, the other services take none")
    module = importlib.import_module(SERVICES[name])
    args = {} if cell is None else {"cell": str(cell)}
    raise typer.Exit(run_service(name, nats, run, module.serve, args))


@app.command()
def doctor(json_: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """Say what this machine has and lacks, with the fix for each lack. Exit code 1 if something is missing."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from cli.doctor import examine

    findings = examine()
    if json_:
        print(json.dumps([asdict(f) for f in findings]))
    else:
        table = Table(box=None)
        for column in ("what", "status", "found", "fix"):
            table.add_column(column)
        colours = {"ok": "green", "warning": "yellow", "missing": "red"}
        for f in findings:
            table.add_row(f.name, f"[{colours[f.status]}]{f.status}[/]", f.detail, f.fix)
        Console().print(table)
    raise typer.Exit(1 if any(f.status == "missing" for f in findings) else 0)


@app.command()
def events(
    run: Annotated[str, typer.Argument(help="Run id, folder, or `latest`.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as events come (a live run).")] = False,
    grep: Annotated[str | None, typer.Option(help="Only lines that match this regular expression.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print a run's stream, readable."""
    from cli.events_view import json_line, line, matcher
    from cli.history import find_run, open_stream

    pattern, folder = matcher(grep), find_run(run)

    async def show() -> None:
        async with open_stream(folder) as bus:
            source = bus.read() if follow else bus.read_until(await bus.last_sequence())
            async for stored in source:
                text = json_line(stored) if json_ else line(stored)
                if pattern.search(text):
                    print(text, flush=follow)

    asyncio.run(show())


@app.command()
def tree(
    run: Annotated[str, typer.Argument(help="Run id, folder, or `latest`.")],
    execution: Annotated[str, typer.Argument(help="Execution id, e.g. g000003x01 (see `gyre events`).")],
) -> None:
    """Draw one execution's trajectory tree: call classes, token counts, which paths were trained."""
    from rich.console import Console

    from cli.history import find_run, open_stream
    from cli.tree_view import draw

    folder = find_run(run)

    async def collect() -> list[Any]:
        async with open_stream(folder) as bus:
            return [s.event async for s in bus.read_until(await bus.last_sequence()) if s.event is not None]

    found = asyncio.run(collect())
    try:
        picture = draw(execution, found)
    except KeyError as error:
        known = sorted({e.execution for e in found if hasattr(e, "execution")})[:5]
        raise UsageError(f"no execution {execution!r} in {folder.name}; for example: {', '.join(known)}") from error
    Console().print(picture)


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="Run id, folder, or `latest`.")],
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Make metrics, pictures and summary of a run again from its stream."""
    from rich.console import Console

    from cli.history import find_run, open_stream, view_of
    from cli.report import print_summary, write_all
    from cli.run_view import RunView
    from cli.summary import summarize

    folder = find_run(run)

    async def collect() -> RunView:
        async with open_stream(folder) as bus:
            return await view_of(bus)

    view = asyncio.run(collect())
    old = folder / "summary.json"
    peak = json.loads(old.read_text())["peak_rss_bytes"] if old.exists() else 0
    summary = summarize(view, wall_s=view.now - view.started_at, peak_rss_bytes=peak)
    files = write_all(view, summary, folder)
    if json_:
        print(json.dumps(summary))
    else:
        print_summary(summary, Console(), files)


@app.command("run-file")
def run_file_reference() -> None:
    """Print the reference of all run-file keys (docs/run-file.md)."""
    from cli.run_file_reference import reference

    print(reference(), end="")


app.command("simulate")(simulator_commands.simulate)
app.command("plan")(simulator_commands.plan)

example = typer.Typer(no_args_is_help=True, help="The example: tasks and warm-started policy.")
app.add_typer(example, name="example")


@example.command("tasks")
def example_tasks(
    out: Annotated[Path | None, typer.Option(help="Where to; default examples/minirepo/tasks.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    force: Annotated[bool, typer.Option(help="Generate again although they exist.")] = False,
) -> None:
    """Generate the example's tasks (seeded; skipped if they are there)."""
    from examples.minirepo import generate

    out = out or Path(generate.__file__).parent / "tasks"
    if (out / "train").is_dir() and not force:
        return
    generate.main(["--out", str(out), "--seed", str(seed)])


@example.command(
    "warmstart", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def example_warmstart(context: typer.Context) -> None:
    """Make the example's tokenizer and warm-started weights again (minutes of processor time; --help for options)."""
    from examples.minirepo import warmstart

    warmstart.main(context.args)


def main() -> None:
    """Entry point: expected failures become one message and exit code 2; anything else is a bug and shows itself."""
    try:
        app()
    except Exception as error:
        from cli.errors import EXPECTED  # only now: a service process must not load the whole command line

        if not isinstance(error, EXPECTED):
            raise
        print(f"gyre: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
