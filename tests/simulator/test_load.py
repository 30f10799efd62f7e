"""The line of seconds per token over the load, and durations brought to the run's mean load."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from shared import events as ev
from shared.events import Sampling
from simulator.load import Call, Presence, fit_law
from simulator.presets import schedule
from simulator.recorded import Recording
from simulator.setup import Setup
from simulator.workloads import Durations
from simulator.world import World


def test_the_line_is_found_through_noise() -> None:
    rng = random.Random(1)
    calls = []
    for _ in range(2000):
        load, tokens = rng.uniform(2, 30), rng.randint(5, 200)
        calls.append(Call("x", tokens * (0.02 + 0.003 * load) * rng.uniform(0.8, 1.2), tokens, load))
    law = fit_law(calls)
    assert law.fixed == pytest.approx(0.02, rel=0.15)
    assert law.per_execution == pytest.approx(0.003, rel=0.1)
    assert law.stretch(law.at) == pytest.approx(1.0)
    assert 0 < law.share < 1


@pytest.mark.parametrize("loads", [(8.0, 8.0, 8.1), (30.0, 20.0, 10.0)])
def test_nothing_is_made_of_one_load_or_a_falling_line(loads: tuple[float, ...]) -> None:
    law = fit_law([Call("x", 1.0 / load, 10, load) for load in loads])
    assert law.per_execution == 0.0
    assert law.share == 0.0


def test_a_run_without_calls_has_no_load() -> None:
    assert fit_law([]).share == 0.0


def test_presence_is_a_mean_over_time() -> None:
    presence = Presence()
    presence.change(10.0, 1)
    presence.change(20.0, 1)
    presence.change(30.0, -2)
    assert presence.mean(10.0, 30.0) == pytest.approx(1.5)
    assert presence.mean(25.0, 35.0) == pytest.approx(1.0)
    assert presence.mean(30.0, 40.0) == 0.0


def _run(placed: dict[str, tuple[float, float]]) -> Recording:
    """One cell; every execution makes one call of 100 tokens over its whole life."""
    recording = Recording()
    timeline: list[tuple[float, ev.Event]] = []
    sampling = Sampling()
    for name, (start, end) in placed.items():
        group = name[:2]
        timeline.append(
            (start, ev.ExecutionDispatched(
                execution=name, group=group, index=0, task="", purpose="train", eval_set="", eval_phase="",
                policy_version=0, burst=1, sampling=sampling, seed=0,
            ))
        )  # fmt: skip
        timeline.append(
            (start, ev.ExecutionPlaced(execution=name, group=group, task="", cell=0, sampling=sampling,
                                       policy_version=0))
        )  # fmt: skip
        timeline.append(
            (end, ev.ModelCallRecorded(
                call=name, execution=name, attempt=1, cell=0, parent="", keep=-1, call_class="main_task", input_ids=b"",
                output_ids=bytes(400), output_logprobs=b"", versions=(), finish_reason="stop", sampling=sampling,
                seconds=end - start,
            ))
        )  # fmt: skip
        timeline.append(
            (end, ev.ExecutionFinished(
                execution=name, group=group, task="", attempt=1, ending="completed", exit_code=0, artifact=None,
                seconds=0.0, cpu_seconds=0.0,
            ))
        )  # fmt: skip
    for now, event in sorted(timeline, key=lambda item: item[0]):
        recording.apply(event, now)
    return recording


def test_durations_are_brought_to_the_mean_load() -> None:
    """Alone, a call takes 10 s; with two in the cell, 20 s: both are the same work."""
    recording = _run({"g0x0": (100.0, 110.0), "g1x0": (200.0, 220.0), "g1x1": (200.0, 220.0)})
    law = fit_law(recording.calls)
    groups, share = recording._at_mean_load(law)
    assert share == pytest.approx(1.0)
    work = 100 * law.per_execution * law.at
    assert [hours * 3600 for group in groups for hours in group] == pytest.approx([work] * 3, rel=0.01)


LOADED = Setup(
    mode="elastic", mu=3, phi=0.5, steps=12, cells=4, capacity=16, groups=4, executions=6,
    durations=Durations(0.01, 0.3, 0.6, 0.05), train_work_h=0.01, to_training_s=2.0, to_rollout_s=2.0, refit_s=1.0,
    pull_s=0.2, commit_s=0.5, assess_s=0.5, supply_fraction=0.25, supply_hold_s=0.3, parts=2, load_share=0.5,
    load_at=10.0,
)  # fmt: skip


def _recorded(setup: Setup) -> Recording:
    """A simulated run with the calls that a proxy would have recorded: one for each stay of an execution in a cell."""
    recording = Recording()
    stays: dict[str, tuple[int, float]] = {}

    def call(name: str, now: float) -> None:
        cell, since = stays[name]
        load = recording.presence[cell].mean(since, now)
        done = (now - since) / (1 - setup.load_share + setup.load_share * load / setup.load_at)
        recording.apply(
            ev.ModelCallRecorded(
                call=name, execution=name, attempt=1, cell=cell, parent="", keep=-1, call_class="main_task",
                input_ids=b"", output_ids=bytes(4 * round(100 * done)), output_logprobs=b"", versions=(),
                finish_reason="stop", sampling=Sampling(), seconds=now - since,
            ),
            now,
        )  # fmt: skip

    def watch(event: Any, now: float) -> None:
        if isinstance(event, ev.ExecutionMoved | ev.ExecutionFinished):
            call(event.execution, now)
        recording.apply(event, now)
        if isinstance(event, ev.ExecutionPlaced):
            stays[event.execution] = (event.cell, now)
        elif isinstance(event, ev.ExecutionMoved):
            stays[event.execution] = (event.to_cell, now)

    World(setup, watch=watch).run()
    return recording


@pytest.mark.parametrize(
    ("mode", "changes"),
    [("elastic", {}), ("async", {"async_cells": 1}), ("async", {"async_cells": 2}), ("colocate", {})],
)
def test_other_modes_come_out_of_one_recorded_run(mode: str, changes: dict[str, Any]) -> None:
    """Calibrated on elastic alone, every mode comes within 10 % of what the machine, here the true setup, would do."""
    recorded = _recorded(LOADED).setup()
    assert recorded.load_share == pytest.approx(0.5, abs=0.15)
    truth = World(replace(schedule(LOADED, mode, 1.5), **changes)).run()
    told = World(replace(schedule(recorded, mode, 1.5), **changes)).run()
    assert told.hours_total == pytest.approx(truth.hours_total, rel=0.1)
