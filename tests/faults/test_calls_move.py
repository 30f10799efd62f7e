"""Cells leave rollout while model calls are live in their engines: the calls go on elsewhere and nobody notices."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared import events as ev
from shared.codec import unpack_floats, unpack_ids
from shared.ids import call_of
from tests.faults.live_run import ROOT, LiveRun, books_balance, live_run
from tests.faults.test_kill_each_service import history

STEPS, GROUPS, MEMBERS = 2, 4, 2


def talkative_model(folder: Path) -> Any:
    """The example's shape and tokenizer with random weights: it seldom says that it is done, so calls are long."""
    import torch
    from transformers import AutoConfig, Qwen3ForCausalLM

    source = ROOT / "examples" / "minirepo" / "model"
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(AutoConfig.from_pretrained(source)).float().eval()
    model.save_pretrained(folder)
    return model


def long_calls(folder: Path, **more: object) -> dict[str, object]:
    """Groups trickle in, so that a cell leaves while others of its calls are in the middle."""
    return {
        "model.path": folder,
        "harness.extra_args": '["--max-turns", "2", "--context-limit", "3000", "--max-output-tokens", "600"]',
        "execution.harness_time_limit_s": 600,
        "execution.overall_budget_s": 900,
        "sampling.max_new_tokens": 600,
        "training.steps": STEPS,
        "scheduler.phi": 0.0,
        "scheduler.groups_per_batch": GROUPS,
        "scheduler.executions_per_group": MEMBERS,
        "scheduler.supply_fraction": 0.25,
        "cells.capacity": 5,
        "evaluation.main": '""',
        "evaluation.sets": "[]",
        **more,
    }


async def finished(run: LiveRun) -> dict[str, Any]:
    summary = await run.end(500)
    async for event in history(run):
        run.seen.append(event)
    books_balance(summary, steps=STEPS, batch=GROUPS * MEMBERS, evaluated=0)
    return summary


def log_probs(model: Any, ids: np.ndarray) -> np.ndarray:
    """log p(ids[t] | ids[:t]) for t >= 1, by a plain forward."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids.tolist()])).logits[0].float()
    rows = torch.log_softmax(logits[:-1], dim=-1)
    return np.asarray(rows.gather(1, torch.tensor(ids[1:].tolist())[:, None])[:, 0])


def of(run: LiveRun, kind: type[ev.Event]) -> list[Any]:
    return [e for e in run.seen if isinstance(e, kind)]


@pytest.mark.e2e
@pytest.mark.timeout(900)
async def test_live_calls_move_without_a_trace_in_harness_or_record(tmp_path: Path) -> None:
    model = talkative_model(tmp_path / "model")
    async with live_run(tmp_path, **long_calls(tmp_path / "model")) as run:
        summary = await finished(run)
    records, cuts, adopted = of(run, ev.ModelCallRecorded), of(run, ev.CallCut), of(run, ev.CallAdopted)

    # calls moved, and what was held for them is let go
    moved = {e.call for e in adopted}
    assert moved
    assert {e.rid for e in adopted} == {e.rid for e in cuts if e.to_cell >= 0}
    assert Counter(e.rid for e in of(run, ev.CallReleased)) == Counter(e.rid for e in cuts if e.lease)
    assert [e.outcome for e in adopted if e.lease and e.outcome == "failed"] == []
    assert sum(e.calls for e in of(run, ev.CellDrained)) >= len(cuts)

    # the harness saw nothing: one request, one answer, no error
    assert {e.ending for e in of(run, ev.ExecutionFinished)} == {"completed"}
    assert of(run, ev.ModelCallRefused) == []
    assert not any(r.discarded for r in records)
    assert max(Counter((r.execution, r.attempt, r.request) for r in records).values()) == 1

    # every token once
    assert summary["tokens"]["generated"] == summary["tokens"]["recorded"] > 0
    prompts = {r.call: unpack_ids(r.input_ids) for r in records if r.parent == ""}
    for record in records:
        output = unpack_ids(record.output_ids)
        assert [s.start for s in record.versions] + [len(output)] == [0] + [s.end for s in record.versions]
        if record.call in moved and record.call in prompts:
            ids = np.concatenate((prompts[record.call], output))
            expected = log_probs(model, ids)[-len(output) :]  # no rewards, so the weights stay as they are
            np.testing.assert_allclose(unpack_floats(record.output_logprobs), expected, atol=1e-3)
            assert record.cell in {e.cell for e in adopted if e.call == record.call}
    assert all(call_of(e.rid) == (e.call, e.execution) for e in cuts)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
async def test_calls_that_are_given_up_are_in_the_books(tmp_path: Path) -> None:
    """Harnesses run out of time in the middle of a call: what the engine had generated is recorded."""
    talkative_model(tmp_path / "model")
    limits = {"execution.harness_time_limit_s": 6, "training.steps": 1, "cells.handover": "recompute"}
    async with live_run(tmp_path, **long_calls(tmp_path / "model", **limits)) as run:
        summary = await run.end(500)
        async for event in history(run):
            run.seen.append(event)
    given_up = [r for r in of(run, ev.ModelCallRecorded) if r.finish_reason == "abort"]
    assert "harness_timeout" in {e.ending for e in of(run, ev.ExecutionFinished)}
    assert given_up
    assert all(r.discarded for r in given_up)
    assert summary["tokens"]["generated"] == summary["tokens"]["recorded"] > 0
