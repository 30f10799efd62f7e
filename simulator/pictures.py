"""Pictures of simulated runs: role timelines of several modes on one workload, published against simulated ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.setup import Setup
from simulator.timeline import Timeline
from simulator.world import World

PALETTE = {
    "rollout": "#3fa7d6", "draining": "#f2c14e", "joining": "#b279a2", "training": "#d1495b", "returning": "#edae49",
}  # fmt: skip
HOUR = 3600.0


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def record(setup: Setup) -> Timeline:
    timeline = Timeline(setup.capacity, setup.engines)
    World(setup, watch=timeline.see).run()
    return timeline


def draw_roles(named: Sequence[tuple[str, Setup]], path: Path, hours: float | None = None) -> None:
    """One row per mode: cells' roles as bars, waterlevel and serving capacity as lines over them."""
    plt = _pyplot()
    from matplotlib.patches import Patch

    lines = [(name, record(setup), setup) for name, setup in named]
    end = hours or max(t.end for _, t, _ in lines) / HOUR
    figure, rows = plt.subplots(len(lines), 1, figsize=(10, 2.1 * len(lines)), sharex=True, constrained_layout=True)
    for axes, (name, timeline, setup) in zip(rows if len(lines) > 1 else [rows], lines, strict=True):
        for cell, changes in timeline.roles.items():
            ends = [t for t, _ in changes[1:]] + [max(timeline.end, end * HOUR)]
            for (start, role), stop in zip(changes, ends, strict=True):
                if start < end * HOUR:
                    width = (min(stop, end * HOUR) - start) / HOUR
                    axes.barh(cell, width, left=start / HOUR, height=0.85, color=PALETTE[role], linewidth=0, alpha=0.75)
        over = axes.twinx()
        for points, colour, style in ((timeline.level, "#102a43", "-"), (timeline.serving, "#7a1022", "--")):
            points = [*points, (max(timeline.end, end * HOUR), points[-1][1])]
            over.step([t / HOUR for t, _ in points], [v for _, v in points], where="post", color=colour, ls=style, lw=1)
        over.set_ylim(0, None)
        over.set_ylabel("executions", fontsize=8)
        for commit in timeline.commits:
            axes.axvline(commit / HOUR, color="black", lw=0.5, alpha=0.5)
        axes.set_yticks(range(setup.engines), ["core", *map(str, range(1, setup.engines))], fontsize=7)
        axes.invert_yaxis()
        axes.set_title(f"{name}: {len(timeline.commits)} steps in {timeline.end / HOUR:.1f} h", fontsize=9, loc="left")
    (rows if len(lines) == 1 else rows[-1]).set_xlabel(
        "hours; bars: role of each cell; black: waterlevel, red dashed: serving capacity; thin lines: steps", fontsize=8
    )
    (rows if len(lines) == 1 else rows[-1]).set_xlim(0, end)
    figure.legend(
        handles=[Patch(color=PALETTE[r], label=r) for r in ("rollout", "training")],
        loc="upper right",
        ncol=2,
        fontsize=8,
    )
    _save(figure, path)


def draw_ratios(rows: Sequence[tuple[str, float, float]], path: Path) -> None:
    """Published ratio (x) against simulated (y), with the 10 % band."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(5.4, 4.6), constrained_layout=True)
    axes.plot([1, 2], [1, 2], color="black", lw=0.8)
    axes.fill_between([1, 2], [0.9, 1.8], [1.1, 2.2], color="#3fa7d6", alpha=0.2, label="within 10 %")
    for name, colour in zip(
        sorted({n for n, _, _ in rows}), ("#d1495b", "#66a182", "#edae49", "#2e4057"), strict=False
    ):
        points = [(p, s) for n, p, s in rows if n == name]
        axes.plot(*zip(*points, strict=True), "o", color=colour, label=name)
    axes.set(xlabel="speed-up of elastic, paper", ylabel="speed-up of elastic, simulated", xlim=(1.1, 2), ylim=(1.1, 2))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    _save(figure, path)


def draw_scale(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Microseconds of the scheduler core per event against executions outstanding."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(5.4, 3.4), constrained_layout=True)
    for cells in sorted({r["cells"] for r in rows}):
        points = [(r["executions"], r["event_us"]) for r in rows if r["cells"] == cells]
        axes.plot(*zip(*points, strict=True), "o-", label=f"{cells} cells")
    axes.set(xscale="log", xlabel="executions outstanding", ylabel="core: microseconds per event")
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """A small PNG, the same bytes for the same picture."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    _pyplot().close(figure)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(64, method=Image.Quantize.MEDIANCUT)
    small.save(path, optimize=True)
