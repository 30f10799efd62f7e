"""What a run leaves for people and tools: metrics.jsonl, TensorBoard files, pictures, the summary table.

Everything is made from a RunView, so it can be made again from the stream at any time (`gyre report RUN`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.run_view import RunView

PALETTE = {
    "offline": "#d0d0d0",
    "rollout": "#3fa7d6",
    "draining": "#f2c14e",
    "joining": "#b279a2",
    "training": "#d1495b",
    "returning": "#edae49",
}


def step_rows(view: RunView) -> list[dict[str, Any]]:
    """One row per committed batch; times in seconds since the run's start."""
    return [
        {
            "step": b.batch,
            "time_s": round(b.committed_at - view.started_at, 3),
            "reward": b.reward,
            "staleness": b.staleness,
            "groups": b.groups,
            "executions": b.executions,
            "micro_steps": b.micro_steps,
            "packed_tokens": b.packed_tokens,
            "path_tokens": b.path_tokens,
            "trained_tokens": b.trained_tokens,
            "cells": list(b.cells),
            "seconds_open": round(b.committed_at - b.opened_at, 3),
            **dict(sorted(b.metrics.items())),
        }
        for b in view.committed
    ]


def write_metrics(view: RunView, folder: Path) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in step_rows(view)))
    return path


def write_tensorboard(view: RunView, folder: Path) -> Path:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    path = folder / "tensorboard"
    for old in path.glob("events.out.tfevents.*") if path.exists() else ():
        old.unlink()
    writer = EventFileWriter(str(path))
    for row, batch in zip(step_rows(view), view.committed, strict=True):
        for key, value in row.items():
            if isinstance(value, int | float) and key != "step":
                summary = Summary(value=[Summary.Value(tag=f"train/{key}", simple_value=float(value))])
                writer.add_event(Event(wall_time=batch.committed_at, step=batch.batch, summary=summary))
    for (phase, name), scores in sorted(view.eval_scores.items()):
        step = 0 if phase == "before" else len(view.committed)
        summary = Summary(value=[Summary.Value(tag=f"eval/{name}", simple_value=sum(scores) / len(scores))])
        writer.add_event(Event(wall_time=view.now, step=step, summary=summary))
    writer.close()
    return path


def draw_reward(view: RunView, folder: Path) -> Path:
    """Reward of each step and its running mean; the evaluation set before and after as points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rewards = [b.reward for b in view.committed]
    steps = [b.batch for b in view.committed]
    mean = [sum(rewards[max(0, i - 4) : i + 1]) / len(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
    figure, axes = plt.subplots(figsize=(8, 4.2), constrained_layout=True)
    axes.plot(steps, rewards, color="#9bbcd1", marker=".", linewidth=1, label="mean reward of the step's executions")
    axes.plot(steps, mean, color="#1b4965", linewidth=2, label="mean of 5 steps")
    end = max(steps, default=0)
    colours = ["#d1495b", "#66a182", "#edae49", "#8d5a97", "#2e4057", "#c9ada7"]
    for i, name in enumerate(sorted({n for _, n in view.eval_scores})):
        points = [(x, view.eval_mean(p, name)) for x, p in ((0, "before"), (end, "after"))]
        known = [(x, y) for x, y in points if y is not None]
        axes.plot(
            [x for x, _ in known], [y for _, y in known], "o--", color=colours[i % 6], label=f"evaluation set {name}"
        )
    axes.set(xlabel="training step", ylabel="reward", title=f"{view.run} ({view.mode})", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    path = folder / "reward.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _level_limit(view: RunView) -> int:
    """Highest waterlevel or capacity of the training phase: evaluations queue far more and would flatten the rest."""
    start = next((t for t, p in view.phases if p == "training"), view.started_at)
    end = next((t for t, p in view.phases if p == "eval_after"), view.now)
    levels = [w for t, w in [*view.waterlevel, *view.capacity] if start < t < end]
    return max([*levels, *(c for _, c in view.capacity), 1])


def draw_roles(view: RunView, folder: Path) -> Path:
    """Role of every cell over time, with the waterlevel and the serving capacity above."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    t0 = view.started_at
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(11, 5.2), sharex=True, constrained_layout=True, gridspec_kw={"height_ratios": [1.3, 1]}
    )
    top.step([t - t0 for t, _ in view.waterlevel], [w for _, w in view.waterlevel], where="post", color="#1b4965", lw=1)
    top.step(
        [t - t0 for t, _ in view.capacity], [c for _, c in view.capacity], where="post", color="#d1495b", lw=1, ls="--"
    )
    top.legend(["waterlevel (dispatched - finished)", "serving capacity"], fontsize=8, loc="upper right")
    top.set_ylim(0, _level_limit(view) * 1.15)
    top.set(ylabel="executions", title=f"{view.run} ({view.mode}): waterlevel and cell roles")
    for batch in view.committed:
        bottom.axvline(batch.committed_at - t0, color="#000000", lw=0.4, alpha=0.35)
    for number, cell in sorted(view.cells.items()):
        ends = [t for t, _ in cell.history[1:]] + [view.now]
        for (start, role), end in zip(cell.history, ends, strict=True):
            bottom.barh(number, end - start, left=start - t0, height=0.8, color=PALETTE[role], linewidth=0)
    bottom.set_yticks(sorted(view.cells), [view.cell_name(n) for n in sorted(view.cells)])
    bottom.invert_yaxis()
    bottom.set(xlabel="seconds since the run began (thin lines: training steps committed)")
    bottom.legend(
        handles=[Patch(color=c, label=r) for r, c in PALETTE.items()], fontsize=8, ncol=6, loc="upper center",
        bbox_to_anchor=(0.5, -0.28),
    )  # fmt: skip
    path = folder / "roles.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def write_all(view: RunView, summary: dict[str, Any], folder: Path) -> dict[str, Path]:
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return {
        "metrics": write_metrics(view, folder),
        "tensorboard": write_tensorboard(view, folder),
        "reward picture": draw_reward(view, folder),
        "roles picture": draw_roles(view, folder),
        "summary": folder / "summary.json",
    }


def _number(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else f"{value}"


def print_summary(summary: dict[str, Any], console: Console, files: dict[str, Path] | None = None) -> None:
    table = Table(title=f"{summary['run']}: {summary['phase']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("mode, steps", f"{summary['mode']}, {summary['steps']}")
    table.add_row("wall time", f"{summary['wall_s']:.0f} s")
    table.add_row("peak memory", f"{summary['peak_rss_bytes'] / 2**30:.2f} GiB")
    for name, phases in summary["evaluation"].items():
        cells = [
            f"{phase} {v['mean']:.3f} ± {v['standard_error']:.3f} (n={v['executions']})" for phase, v in phases.items()
        ]
        table.add_row(f"evaluation {name}", "   ".join(sorted(cells, reverse=True)))
    table.add_row(
        "training reward",
        f"first quarter {_number(summary['reward_first_quarter'])}, "
        f"last quarter {_number(summary['reward_last_quarter'])}",
    )
    table.add_row(
        "staleness, switches", f"{_number(summary['mean_staleness'])} steps, {summary['role_switches']} role switches"
    )
    table.add_row("executions", ", ".join(f"{k} {v}" for k, v in summary["executions"].items()))
    table.add_row("tokens", ", ".join(f"{k} {_number(v)}" for k, v in summary["tokens"].items()))
    table.add_row("where time goes", _where(summary["seconds"]))
    for what, path in (files or {}).items():
        table.add_row(what, str(path))
    if summary["policy"]:
        table.add_row("final policy", summary["policy"])
    console.print(table)


def _where(seconds: dict[str, float]) -> str:
    """Sums over executions and cells that work side by side: shares of effort, not of wall time."""
    tools = max(0.0, seconds.get("executions", 0.0) - seconds.get("model_calls", 0.0))
    parts = {
        "model calls": seconds.get("model_calls", 0.0),
        "harness and tools": tools,
        "tests": seconds.get("tests", 0.0),
        "training": seconds.get("training", 0.0) + seconds.get("commit", 0.0),
        "switching and refits": seconds.get("switching", 0.0) + seconds.get("refit", 0.0),
    }
    return ", ".join(f"{k} {v:.0f} s" for k, v in parts.items()) + " (summed over parallel work)"
