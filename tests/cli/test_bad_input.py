"""Bad input is refused before anything starts: key, value and fix, exit code 2, no traceback, no run folder."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RUN_FILE = "examples/minirepo/run.yaml"


def gyre(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["up"], ["which run file"]),
        (["up", "missing.yaml"], ["missing.yaml", "check the path"]),
        (["up", RUN_FILE, "--set", "nope"], ["--set", "key=value"]),
        (["up", RUN_FILE, "--set", "training.step=3"], ["training.step", "did you mean `steps`"]),
        (["up", RUN_FILE, "--set", "training.steps=many"], ["training.steps", '"many"']),
        (["up", RUN_FILE, "--mode", "fast"], ["scheduler.mode", "elastic, async, colocate"]),
        (["up", RUN_FILE, "--set", "cells.capacity=4"], ["8 groups x 8 executions", "cells.capacity"]),
        (["up", RUN_FILE, "--set", "cells.tensor_parallel=3"], ["cells.tensor_parallel", "does not divide"]),
        (["up", RUN_FILE, "--set", "model.path=/nowhere"], ["model.path", "is no folder"]),
        (["up", RUN_FILE, "--set", "harness.name=foo"], ["harness.name", "mini-swe-agent"]),
        (["up", "--resume", "nothing"], ["no run 'nothing'"]),
        (["events", "nothing"], ["no run 'nothing'"]),
        (["serve", "foo", "--nats", "nats://x", "--run", "y"], ["no service 'foo'", "scheduler"]),
        (["serve", "cell-agent", "--nats", "nats://x", "--run", "y"], ["--cell"]),
    ],
)
def test_refused_with_the_fix(args: list[str], words: list[str]) -> None:
    done = gyre(*args)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_broken_tasks_are_named_and_left_out(tmp_path: Path) -> None:
    from io import StringIO

    from rich.console import Console

    from cli.up import NoTasks, usable_tasks

    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        (folder / "tests").mkdir(parents=True)
        (folder / "task.toml").write_text('version = "1.0"\n')
        (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (good / "instruction.md").write_text("do it\n")
    out = StringIO()
    assert usable_tasks(str(tmp_path), "tasks.train", Console(file=out, width=200)) == (str(good),)
    assert str(bad) in out.getvalue()
    (good / "instruction.md").unlink()
    with pytest.raises(NoTasks, match=r"tasks\.train"):
        usable_tasks(str(tmp_path), "tasks.train", Console(file=out))
