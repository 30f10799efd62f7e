"""Fits, files, the planner and the calibration from a recorded run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared import events as ev
from simulator.files import BadSetup, read_setup, read_trace
from simulator.page import rendered
from simulator.planner import NoPlan, Wish, plan, smallest_cell
from simulator.presets import NL2REPO, NL2REPO_BIG, PRESETS, schedule
from simulator.recorded import Recording
from simulator.study import best_split, compare, published_rows
from simulator.workloads import Durations, fit
from simulator.world import World
from tests.simulator.test_world import SMALL


def test_the_fit_has_the_published_moments() -> None:
    law = fit(1.93, 2.96, 0.0951, 0.0087, 16)
    for name in ("median_h", "task_sigma", "execution_sigma", "limit_h"):
        assert getattr(NL2REPO, name) == pytest.approx(float(getattr(law, name)), rel=0.01)
    moments = NL2REPO.moments(16)
    assert moments.execution_mean_h == pytest.approx(1.93, rel=0.01)
    assert moments.group_mean_h == pytest.approx(2.96, rel=0.01)
    assert moments.executions_at_limit == pytest.approx(0.0087, rel=0.1)


def test_the_large_model_has_the_published_shares() -> None:
    moments = NL2REPO_BIG.moments(16)
    assert moments.groups_over_4h == pytest.approx(0.611, abs=0.01)
    assert moments.groups_at_limit == pytest.approx(0.611 * 0.382, abs=0.01)


def test_durations_depend_on_seed_and_group_only() -> None:
    assert NL2REPO.group(3, 7, 16) == NL2REPO.group(3, 7, 16)
    assert NL2REPO.group(3, 7, 16) != NL2REPO.group(4, 7, 16)
    assert max(NL2REPO.group(0, 1, 1000)) <= NL2REPO.limit_h


def test_each_preset_is_calibrated_on_one_number_and_schedules_match() -> None:
    for p in PRESETS.values():
        assert sum(item == p.target for item in p.published) == (0 if isinstance(p.target, float) else 1)
        for staleness in (1.0, 1.5, 2.0):
            for mode in ("elastic", "async", "colocate", "lookahead"):
                assert schedule(p.setup, mode, staleness).staleness == staleness


def test_compare_has_the_promised_keys() -> None:
    small = replace(SMALL, steps=8)
    plain = compare("small", small, 1.5, ("elastic", "async", "colocate", "lookahead"), [0])
    keys = {"hours_per_step", "hours_total", "mean_staleness", "rollout_idle", "train_idle"}
    assert all(keys <= set(m) for m in plain["modes"].values())
    assert {"preset", "staleness", "speedup_vs_async", "speedup_vs_colocate", "floor_hours_per_step"} <= set(plain)
    p = replace(PRESETS["deepswe-122b"], published=PRESETS["deepswe-122b"].published[:2])
    assert [row["baseline"] for row in published_rows(p, {1.5: plain})] == ["async", "colocate"]


def test_best_split_is_the_fastest() -> None:
    setup = replace(schedule(SMALL, "async", 1.5), steps=8)
    times = {n: World(replace(setup, async_cells=n)).run().hours_per_step for n in range(1, setup.cells)}
    assert times[best_split(setup, 0)] == min(times.values())


def test_files(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"group": i // 4, "hours": 1 + i % 4}) + "\n" for i in range(16)))
    assert read_trace(trace).moments(4).group_mean_h == 4.0
    file = tmp_path / "s.yaml"
    file.write_text(
        "cells: 3\ncapacity: 8\ngroups: 4\nexecutions: 4\ndurations: {median_h: 1, task_sigma: 0.2}\nsteps: 3\n"
    )
    assert World(read_setup(file)).run().steps == 3
    file.write_text("cells: 3\ncapacity: 8\ngroups: 4\nexecutions: 4\ndurations: {trace: trace.jsonl}\nwings: 2\n")
    with pytest.raises(BadSetup, match="wings"):
        read_setup(file)
    trace.write_text("{}\n")
    with pytest.raises(BadSetup, match=r"trace\.jsonl:1"):
        read_trace(trace)


def test_planner_finds_the_papers_cells() -> None:
    assert smallest_cell(Wish(gpus=0, gpu="h200", parameters=122e9, durations=NL2REPO)) == 24  # paper: 32
    assert smallest_cell(Wish(gpus=0, gpu="h200", parameters=2.4e12, durations=NL2REPO)) == 384  # paper: 384
    with pytest.raises(NoPlan, match="two cells need 48"):
        plan(Wish(gpus=32, gpu="h200", parameters=122e9, durations=NL2REPO))


def test_planner_says_what_limits() -> None:
    wish = Wish(
        gpus=8, gpu="h200", parameters=1e9, durations=Durations(1.0, 0.3, 0.3, 4.0), groups=4, executions=4, steps=6
    )
    few_places = plan(replace(wish, places_per_gpu=1.0, train_hours=0.1))
    assert few_places["limited_by"]["what"] == "places"
    much_training = plan(replace(wish, places_per_gpu=100.0, train_hours=20.0))
    assert much_training["limited_by"]["what"] == "training"
    neither = plan(replace(wish, places_per_gpu=100.0, train_hours=0.01))
    assert neither["limited_by"]["what"] == "latency of the groups"


@pytest.mark.parametrize("mode", ["elastic", "async"])
def test_a_recording_of_a_simulated_run_simulates_to_itself(mode: str) -> None:
    """Calibrated on its own events, a run comes out as it was (drawn again from its own durations)."""
    recording = Recording()

    def watch(event: Any, now: float) -> None:
        recording.apply(event, now)

    setup = replace(schedule(SMALL, mode, 1.5), streamed=True, async_cells=2)
    result = World(setup, watch=watch).run()
    again = recording.setup()
    assert again.train_work_h == pytest.approx(setup.train_work_h, rel=1e-6)
    assert again.commit_s == pytest.approx(setup.commit_s)
    assert again.to_rollout_s == pytest.approx(setup.to_rollout_s, abs=0.1)
    assert recording.hours_per_step == pytest.approx(result.hours_per_step)
    assert World(again).run().hours_per_step == pytest.approx(result.hours_per_step, rel=0.1)


def test_a_recording_without_steps_says_so() -> None:
    recording = Recording()
    recording.apply(ev.RunPhaseChanged(phase="training"), 1.0)
    with pytest.raises(BadSetup, match="no committed training step"):
        recording.setup()


def test_the_page_is_what_the_results_give() -> None:
    """docs/simulator.md was not edited by hand, and its words are the current ones."""
    page = Path(__file__).parents[2] / "docs/simulator.md"
    assert page.read_text() == rendered(page)
