"""docs/simulator.md and its pictures, made anew by `gyre simulate --write-page docs/simulator.md`.

Invariant: every figure on the page comes from the simulations of the same call (or, for the scale table, from
benchmarks/simulator_scale.py, whose command is printed beside); the words around them are in page_text.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator import page_text as text
from simulator.pictures import draw_ratios, draw_roles, draw_scale
from simulator.presets import PRESETS, Preset, schedule
from simulator.study import MODES, ablation, best_split, compare, mean, published_rows, run

RESULTS = "results.json"
SCALE = "scale.json"  # in the pictures' folder; written by hand from the benchmark, since it takes minutes


def write(page: Path, seeds: int, say: Callable[[str], None]) -> None:
    """Simulate everything, write the page, and draw its pictures into the folder beside it."""
    folder = page.with_suffix("")
    numbers = list(range(seeds))
    results: dict[str, dict[float, dict[str, Any]]] = {}
    for p in PRESETS.values():
        targets = sorted({item.staleness for item in p.published}, reverse=True)
        results[p.name] = {}
        for staleness in targets:
            say(f"{p.name} at staleness {staleness}")
            results[p.name][staleness] = compare(p.name, p.setup, staleness, MODES, numbers)
    big, elastic_hours = PRESETS["nl2repo-2.4t"], results["nl2repo-2.4t"][1.5]["modes"]["elastic"]["hours_per_step"]
    one = mean(run(replace(schedule(big.setup, "async", 1.5), async_cells=1), numbers)).hours_per_step / elastic_hours
    say("ablation")
    rows = ablation(numbers)
    say("pictures")
    _pictures(folder, results)
    plain = {"seeds": seeds, "one_cell": one, "presets": results, "ablation": rows}
    (folder / RESULTS).write_text(json.dumps(plain, indent=1) + "\n")
    render_again(page)


def rendered(page: Path) -> str:
    """The page's text from results.json and scale.json in the folder beside it."""
    folder = page.with_suffix("")
    plain = json.loads((folder / RESULTS).read_text())
    results = {name: {float(k): v for k, v in by.items()} for name, by in plain["presets"].items()}
    return render(results, plain["ablation"], plain["seeds"], _scale(folder), plain["one_cell"])


def render_again(page: Path) -> None:
    """For changed words, without simulating: `python -m simulator.page docs/simulator.md`."""
    if scale := _scale(page.with_suffix("")):
        draw_scale(scale["curve"], page.with_suffix("") / "core-cost.png")
    page.write_text(rendered(page))


def _scale(folder: Path) -> dict[str, Any] | None:
    path = folder / SCALE
    return json.loads(path.read_text()) if path.exists() else None


def render(
    results: dict[str, dict[float, dict[str, Any]]],
    rows: dict[str, Any],
    seeds: int,
    scale: dict[str, Any] | None,
    one_cell: float,
) -> str:
    """`one_cell`: ratio of the 2.4T run against Async with one training cell."""
    varied = table(("assumption instead", "what it mends", "what it breaks"), text.VARIED)
    reading = text.READING.format(
        one_cell=one_cell, one_cell_error=100 * (one_cell * 75.42 / 134.55 - 1), varied=varied
    )
    parts = [text.HEAD.format(seeds=seeds), _published_table(results), reading]
    parts += [text.LOOKAHEAD, _lookahead_table(results), text.FLOOR]
    parts += [text.ABLATION, _ablation_table(rows), text.ABLATION_READING]
    parts += [text.TIMELINES]
    for p in PRESETS.values():
        parts.append(_preset(p, results[p.name]))
    parts += [text.MODEL, text.PLAN, text.FROM_RUN, text.SCALE]
    if scale:
        parts.append(_scale_table(scale))
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _published_table(results: dict[str, dict[float, dict[str, Any]]]) -> str:
    rows = []
    for p in PRESETS.values():
        for row in published_rows(p, results[p.name]):
            error = "input" if row["calibrated"] else f"{row['error_percent']:+.1f} %"
            rows.append(
                (p.name, row["staleness"], row["baseline"], f"{row['paper']:.3f}", f"{row['simulated']:.3f}", error)
            )
    return table(("preset", "staleness", "elastic against", "paper", "simulated", "error"), rows)


def _lookahead_table(results: dict[str, dict[float, dict[str, Any]]]) -> str:
    rows = []
    for name, by_target in results.items():
        for staleness, plain in by_target.items():
            elastic, ahead = plain["modes"]["elastic"], plain["modes"]["lookahead"]
            rows.append(
                (
                    name, staleness, f"{elastic['hours_per_step']:.3f}", f"{ahead['hours_per_step']:.3f}",
                    f"{100 * (ahead['hours_per_step'] / elastic['hours_per_step'] - 1):+.1f} %",
                    f"{elastic['mean_staleness']:.2f}", f"{ahead['mean_staleness']:.2f}",
                    f"{elastic['floor_ratio']:.3f}", f"{ahead['floor_ratio']:.3f}",
                )
            )  # fmt: skip
    head = (
        "preset", "target", "elastic h/step", "lookahead h/step", "change", "elastic staleness", "lookahead staleness",
        "elastic / floor", "lookahead / floor",
    )  # fmt: skip
    return table(head, rows)


def _ablation_table(plain: dict[str, Any]) -> str:
    rows = [
        (
            r["change"], f"{r['paper_percent']:+.1f} %", f"{r['simulated_percent']:+.1f} %",
            f"{r['error_points']:+.1f}", "yes" if r["same_sign"] else "no",
        )
        for r in plain["rows"]
    ]  # fmt: skip
    hours = plain["hours_total"]
    note = (
        f"\nFastest configuration: paper {plain['paper_hours_fastest']} h, simulated {hours['elastic']:.2f} h (the "
        f"number that the training work is calibrated on); lookahead {hours['lookahead']:.2f} h. Async trains on "
        f"{plain['splits']['async_training_cells']} of 8 cells, the coarse variants switch "
        f"{plain['splits']['switching_cells']}.\n"
    )
    return table(("change", "paper", "simulated", "points off", "same sign"), rows) + note


def _preset(p: Preset, by_target: dict[float, dict[str, Any]]) -> str:
    lines = [f"### {p.name}", "", f"{p.title}.", ""]
    lines += [f"- Put in (published): {item}." for item in p.inputs]
    lines += [f"- Assumed: {item}." for item in p.assumptions]
    lines.append(f"- Calibrated: {p.setup.train_work_h} cell-hours of training per batch, from {p.calibrated_on}.")
    lines += [f"- {note}" for note in p.notes]
    if p.published_hours:
        plain = by_target[1.5]["modes"]
        shown = ", ".join(
            f"{mode} {plain[mode]['hours_total']:.1f} h (paper {hours})" for mode, hours in p.published_hours.items()
        )
        lines.append(f"- Hours of the whole run: {shown}.")
    lines.append("")
    rows = []
    for staleness, plain in by_target.items():
        for mode, m in plain["modes"].items():
            split = f"{m['training_cells']} cells train" if "training_cells" in m else ""
            rows.append(
                (
                    staleness, mode, f"{m['hours_per_step']:.3f}", f"{m['hours_total']:.1f}",
                    f"{m['mean_staleness']:.2f}", f"{100 * m['rollout_idle']:.0f} %", f"{100 * m['train_idle']:.0f} %",
                    split,
                )
            )  # fmt: skip
    head = ("target", "mode", "h/step", "hours", "staleness", "rollout idle", "train idle", "")
    return "\n".join(lines) + "\n" + table(head, rows)


def _scale_table(scale: dict[str, Any]) -> str:
    runs = table(
        ("mode", "cells", "executions", "steps", "seconds", "processor seconds", "peak GB"),
        [
            tuple(r[k] for k in ("mode", "cells", "executions", "steps", "seconds", "cpu_seconds", "peak_gb"))
            for r in scale["runs"]
        ],
    )
    points = table(
        ("cells", "executions outstanding", "microseconds per event"),
        [(r["cells"], r["executions"], r["event_us"]) for r in scale["curve"]],
    )
    return f"{runs}\n![cost of the core per event](simulator/core-cost.png)\n\n{points}"


def _pictures(folder: Path, results: dict[str, dict[float, dict[str, Any]]]) -> None:
    for name, hours in (("nl2repo-122b", 17.0), ("nl2repo-2.4t", 21.0)):
        setup = replace(PRESETS[name].setup, steps=12)
        named = []
        for mode in ("async", "colocate", "elastic", "lookahead"):
            scheduled = schedule(setup, mode, 1.5)
            if mode == "async":
                scheduled = replace(scheduled, async_cells=best_split(scheduled, 0))
            named.append((mode, scheduled))
        draw_roles(named, folder / f"roles-{name}.png", hours)
    points = [
        (p.name, row["paper"], row["simulated"]) for p in PRESETS.values() for row in published_rows(p, results[p.name])
    ]
    draw_ratios(points, folder / "ratios.png")


if __name__ == "__main__":
    import sys

    render_again(Path(sys.argv[1]))
