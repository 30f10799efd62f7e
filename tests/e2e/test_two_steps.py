"""The whole system on real parts: two training steps, then the books must balance."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SMALL = {
    "training.steps": 2,
    "scheduler.groups_per_batch": 3,
    "scheduler.executions_per_group": 4,
    "scheduler.mu": 1,
    "scheduler.phi": 1.0,
    "cells.count": 2,
    "cells.capacity": 12,
    "cells.engine_tokens": 16384,
    "evaluation.main": "eval",
    "evaluation.sets": f"[{{name: eval, tasks: {ROOT}/examples/minirepo/tasks/eval, executions: 4}}]",
}


def gyre(*args: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["elastic"])
def test_two_steps(mode: str, tmp_path: Path) -> None:
    settings = [x for k, v in SMALL.items() for x in ("--set", f"{k}={v}")]
    run_file = ROOT / "examples" / "minirepo" / "run.yaml"
    done = gyre("up", str(run_file), "--json", "--mode", mode, "--set", f"runs_dir={tmp_path}", *settings, timeout=580)
    assert done.returncode == 0, done.stderr[-6000:]
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    counts, tokens = summary["executions"], summary["tokens"]
    assert summary["steps"] == 2
    assert counts["dispatched"] == counts["finished"] + counts["outstanding"]
    assert counts["outstanding"] == 0
    assert counts["trained"] == 2 * 3 * 4 - counts["excluded"]
    assert counts["evaluated"] == 8
    assert tokens["generated"] == tokens["recorded"] > 0
    assert summary["role_switches"] >= 1
    folder = Path(summary["run_dir"])
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert (folder / "roles.png").stat().st_size > 5000
    _policy_loads_and_moved(folder)
    listing = gyre("events", str(folder), "--grep", "batch_committed")
    assert listing.returncode == 0
    assert len(listing.stdout.splitlines()) == 2
    tree = gyre("tree", str(folder), "g000000x00")
    assert tree.returncode == 0, tree.stderr
    assert "main_task" in tree.stdout


def _policy_loads_and_moved(folder: Path) -> None:
    """Plain transformers loads the final policy, and training changed it."""
    import torch
    from transformers import AutoModelForCausalLM

    after = AutoModelForCausalLM.from_pretrained(folder / "policy").state_dict()
    before = AutoModelForCausalLM.from_pretrained(ROOT / "examples" / "minirepo" / "model").state_dict()
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[k], before[k]) for k in after)
