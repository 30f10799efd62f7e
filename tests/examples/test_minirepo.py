"""The minirepo tasks: generated the same each time, honest about what is hidden, solvable, and held out for real."""

import filecmp
import os
import random
import subprocess
import tomllib
from pathlib import Path

import pytest

from examples.minirepo.family import KINDS, SPLITS, combination, make_task
from examples.minirepo.generate import main, write_task


def run_tests(task_folder: Path, workspace: Path, logs: Path) -> float:
    """test.sh as an evaluator runs it: in the workspace, with a clean environment."""
    subprocess.run(
        ["sh", str(task_folder / "tests/test.sh")],
        cwd=workspace,
        env={"PATH": os.environ["PATH"], "VERIFIER_LOGS": str(logs)},
        check=True,
        timeout=20,
    )
    return float((logs / "reward.txt").read_text())


def test_the_same_arguments_write_the_same_bytes(tmp_path):
    arguments = ["--seed", "3", "--train", "8", "--eval", "4", "--heldout", "4"]
    for name in ("one", "two"):
        assert main(["--out", str(tmp_path / name), *arguments]) == 0
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file())
    assert len({p.parts[:2] for p in files}) == 16
    match, mismatch, errors = filecmp.cmpfiles(tmp_path / "one", tmp_path / "two", files, shallow=False)
    assert (len(match), mismatch, errors) == (len(files), [], [])


def test_another_seed_gives_other_tasks():
    assert make_task("train", 4).instruction != make_task("train", 8).instruction
    assert make_task("train", 4).instruction != make_task("eval", 4).instruction


def test_bad_arguments_are_refused(tmp_path):
    for wrong in (["--seed", "10"], ["--train", "-1"]):
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path), *wrong])


@pytest.mark.parametrize("kind", KINDS)
def test_folder_has_the_harbor_layout_and_hides_its_tests(tmp_path, kind):
    task = make_task("train", 5, kind)
    write_task(task, tmp_path / task.name)
    folder = tmp_path / task.name
    settings = tomllib.loads((folder / "task.toml").read_text())
    assert settings["metadata"]["kind"] == kind
    assert settings["verifier"]["timeout_sec"] > 0
    assert settings["agent"]["timeout_sec"] > 0
    assert (folder / "instruction.md").read_text().strip() == task.instruction
    assert "WORKDIR /app" in (folder / "environment/Dockerfile").read_text()
    visible = [p for p in (folder / "environment").rglob("*") if p.is_file()]
    assert {p.name for p in visible} == {"Dockerfile", *task.workspace}
    for path in visible:
        text = path.read_text()
        assert "def " not in text
        assert all(function.name + "(" not in text for file in task.files for function in file.functions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS)
def test_the_solution_scores_one_and_an_untouched_workspace_zero(tmp_path, split, kind):
    task = make_task(split, random.Random(split + kind).randrange(10_000), kind)
    folder = tmp_path / "task"
    write_task(task, folder)
    workspace = folder / "environment/workspace"
    assert run_tests(folder, workspace, tmp_path / "logs") == 0.0
    for file in task.files:
        (workspace / file.path).write_text(file.source())
    assert run_tests(folder, workspace, tmp_path / "logs") == 1.0


def test_half_a_solution_scores_its_fraction(tmp_path):
    task = make_task("train", 5, "pair")
    write_task(task, tmp_path / "task")
    workspace = tmp_path / "task/environment/workspace"
    (workspace / task.files[0].path).write_text(task.files[0].source())
    (workspace / task.files[1].path).write_text("this is no Python")
    assert run_tests(tmp_path / "task", workspace, tmp_path / "logs") == pytest.approx(0.5)


def test_a_submission_that_ends_the_checker_scores_zero(tmp_path):
    task = make_task("train", 5, "plain")
    write_task(task, tmp_path / "task")
    workspace = tmp_path / "task/environment/workspace"
    (workspace / task.files[0].path).write_text(task.files[0].source() + "import os\nos._exit(0)\n")
    subprocess.run(["sh", "../../tests/test.sh"], cwd=workspace, env=os.environ | {"VERIFIER_LOGS": str(tmp_path)})
    assert float((tmp_path / "reward.txt").read_text()) == 0.0


def test_held_out_combinations_are_never_trained_or_evaluated():
    seen = {split: set() for split in SPLITS}
    for split in SPLITS:
        for seed in range(2000):
            seen[split] |= {combination(f) for file in make_task(split, seed).files for f in file.functions}
    assert seen["train"]
    assert seen["heldout"]
    assert not seen["heldout"] & (seen["train"] | seen["eval"])


def test_every_kind_has_a_quarter_of_the_tasks():
    kinds = [make_task("train", seed).kind for seed in range(64)]
    assert all(kinds.count(kind) == 16 for kind in KINDS)
