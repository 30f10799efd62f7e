"""The view is a fold: figures balance, and every consumer of the view agrees."""

import json

import pytest

from cli.events_view import matcher, shorten
from cli.live_view import plain_line, render, role_bar
from cli.report import step_rows, write_all
from cli.run_view import RunView
from cli.summary import quarter_means, summarize
from cli.tree_view import draw
from cli.usage import UsageError
from shared import events as ev
from shared.codec import pack_floats, pack_ids


def started(steps: int = 2) -> ev.RunStarted:
    config = {
        "scheduler": {"mode": "elastic"},
        "training": {"steps": steps},
        "evaluation": {"sets": [{"name": "eval"}], "main": ""},
        "cells": {"count": 2},
    }
    return ev.RunStarted(run="r", config=config, run_dir="/r", train_tasks=(), eval_tasks={}, started_at=100.0)


def dispatched(execution: str, purpose: str = "train") -> ev.ExecutionDispatched:
    return ev.ExecutionDispatched(
        execution=execution, group="g", index=0, task="t", purpose=purpose, policy_version=0,
        eval_set="eval" if purpose == "eval" else "", eval_phase="before" if purpose == "eval" else "",
    )  # fmt: skip


def finished(execution: str) -> ev.ExecutionFinished:
    return ev.ExecutionFinished(
        execution=execution, group="g", task="t", attempt=1, ending="completed", exit_code=0, artifact=None,
        seconds=2.0, cpu_seconds=0.1,
    )  # fmt: skip


def assessed(execution: str, score: float, status: str = "scored") -> ev.ExecutionAssessed:
    return ev.ExecutionAssessed(
        execution=execution, group="g", attempt=1, artifact="", branch="main", status=status, score=score, tries=1,
        seconds=0.1,
    )  # fmt: skip


def call(number: int, parent: str = "", **more: object) -> ev.ModelCallRecorded:
    return ev.ModelCallRecorded(
        call=f"g0x00a1c{number:04d}", execution="g0x00", attempt=1, cell=0, parent=parent, keep=-1,
        call_class="main_task", input_ids=pack_ids([1, 2, 3]), output_ids=pack_ids([4, 5]),
        output_logprobs=pack_floats([-0.5, -0.25]), versions=(ev.VersionSpan(0, 0, 2),), finish_reason="stop",
        sampling=ev.Sampling(), seconds=0.5, **more,
    )  # fmt: skip


def story() -> list[ev.Event]:
    first = call(1)
    return [
        started(),
        ev.CellStarted(cell=0, incarnation="a"),
        ev.CellEngineReady(cell=0, incarnation="a", url="u", version=0, capacity=4),
        ev.CellRoleChanged(
            cell=0, incarnation="a", order=0, role="rollout", previous="offline", seconds=1.0, version=0
        ),
        dispatched("e0", "eval"),
        dispatched("g0x00"),
        ev.ExecutionStarted(execution="e0", attempt=1, key_hash="h", harness="scout"),
        ev.ExecutionStarted(execution="g0x00", attempt=1, key_hash="h", harness="scout"),
        first,
        call(2, parent=first.call),
        finished("e0"),
        finished("e0"),  # redelivered: counted once
        finished("g0x00"),
        assessed("e0", 0.5),
        assessed("g0x00", 1.0),
        ev.GroupAssigned(
            group="g0", batch=1, policy_version=0, advantages={"g0x00": 1.0},
            paths={"g0x00": (ev.PathSelected(leaf="g0x00a1c0002", call_class="main_task", tokens=4),)},
        ),
        ev.BatchOpened(batch=1, attempt=1, base_version=0, groups=1, burst=1),
        ev.MicroStepReady(
            micro_step="m", batch=1, groups=("g0",), tokens=10, path_tokens=20, trained_tokens=4, payload=b"", blob=None
        ),
        ev.BatchSealed(
            batch=1, groups=("g0",), executions=1, micro_steps=("m",), mean_reward=1.0, mean_staleness=0.5
        ),
        ev.BatchCommitted(
            batch=1, attempt=1, version=1, cells=(0,), micro_steps=("m",), checkpoint="c", seconds=0.2,
            metrics={"grad_norm": 1.5},
        ),
        ev.EngineCounted(cell=0, incarnation="a", engine="e", generated_tokens=4),
        ev.RunPhaseChanged(phase="finished"),
    ]  # fmt: skip


def folded() -> RunView:
    view = RunView()
    for i, event in enumerate(story()):
        view.apply(event, 100.0 + i)
    return view


def test_figures_balance() -> None:
    summary = summarize(folded(), wall_s=12.0, peak_rss_bytes=1)
    counts, tokens = summary["executions"], summary["tokens"]
    assert counts["dispatched"] == counts["finished"] + counts["outstanding"] == 2
    assert tokens["generated"] == tokens["recorded"] == 4
    assert tokens["trained"] == 4
    assert tokens["dedup_factor"] == 2.0
    assert summary["reward_before"] == 0.5
    assert (counts["trained"], counts["evaluated"]) == (1, 1)
    json.dumps(summary)


def test_report_files_are_written(tmp_path) -> None:
    view = folded()
    files = write_all(view, summarize(view, wall_s=1.0, peak_rss_bytes=1), tmp_path)
    assert all(path.exists() for path in files.values())
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["grad_norm"] == 1.5
    assert row == step_rows(view)[0]


def test_live_view_shows_step_and_cells() -> None:
    from rich.console import Console

    view = folded()
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(view, 130.0))
    text = console.export_text()
    assert "step 1/2" in text
    assert "core" in text
    assert "step 1/2" in plain_line(view, 130.0)
    assert len(role_bar(view.cells[0].history, 100.0, 130.0, width=20)) == 20


def test_tree_names_trained_paths() -> None:
    from rich.console import Console

    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(draw("g0x00", story()))
    text = console.export_text()
    assert "path 1 ends here, 4 tokens trained" in text
    assert "on a trained path" in text
    with pytest.raises(KeyError):
        draw("unknown", story())


def test_quarters_and_shortening() -> None:
    assert quarter_means([0, 0, 1, 1, 1, 1, 1, 3]) == (0.0, 2.0)
    assert quarter_means([]) == (None, None)
    assert shorten(b"abc") == "<3 bytes>"
    with pytest.raises(UsageError, match="no regular expression"):
        matcher("(")
