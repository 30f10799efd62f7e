"""Task folders: what is one, and what a broken one says."""

import os
from pathlib import Path

import pytest

from shared.tasks import BrokenTask, load, load_folder


def write_task(folder: Path, **changes: str | None) -> Path:
    files: dict[str, str | None] = {
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 30.0\n[verifier]\ntimeout_sec = 5\n',
        "instruction.md": "Write hello.txt.\n",
        "environment/Dockerfile": "FROM scratch\n",
        "environment/workspace/README.md": "start\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    } | {name.replace("__", "/").replace("_dot_", "."): text for name, text in changes.items()}
    for name, text in files.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def test_a_whole_task_is_loaded(tmp_path: Path) -> None:
    task = load(write_task(tmp_path / "hello"))
    assert task.name == "hello"
    assert task.instruction == "Write hello.txt."
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (30.0, 5.0)
    assert task.workspace == tmp_path / "hello" / "environment" / "workspace"


def test_limits_and_environment_are_optional(tmp_path: Path) -> None:
    folder = write_task(
        tmp_path / "t",
        task_dot_toml='[verifier]\nenv = { MODE = "x" }\n',
        environment__Dockerfile=None,
        environment__workspace__README_dot_md=None,
    )
    task = load(folder)
    assert task.workspace is None
    assert task.agent_timeout_s is None
    assert task.verifier_env == (("MODE", "x"),)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task_dot_toml": None}, "task.toml is missing"),
        ({"task_dot_toml": "[agent\n"}, "not valid TOML"),
        ({"task_dot_toml": "agent = 3\n"}, "must be a table"),
        ({"task_dot_toml": "[agent]\ntimeout_sec = -1\n"}, "agent.timeout_sec must be a positive number"),
        ({"task_dot_toml": "[verifier]\ntimeout_sec = nan\n"}, "verifier.timeout_sec must be a positive number"),
        ({"task_dot_toml": '[verifier]\nenv = { A = "${HOME}" }\n'}, "variables of the host"),
        ({"instruction_dot_md": None}, "instruction.md is missing"),
        ({"instruction_dot_md": " \n"}, "instruction.md is empty"),
        ({"instruction_dot_md": "x" * 100_001}, "more than 100000"),
        ({"tests__test_dot_sh": None}, "tests/test.sh is missing"),
        ({"environment__workspace__README_dot_md": None}, "environment/workspace/ is missing"),
    ],
)
def test_a_broken_task_says_what_is_wrong(tmp_path: Path, changes: dict[str, str | None], said: str) -> None:
    with pytest.raises(BrokenTask) as caught:
        load(write_task(tmp_path / "odd", **changes))
    assert said in caught.value.reason
    assert str(tmp_path / "odd") in str(caught.value)


def test_special_files_cannot_start_a_workspace(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "pipe")
    os.mkfifo(folder / "environment" / "workspace" / "fifo")
    with pytest.raises(BrokenTask, match="fifo is a device, socket or pipe"):
        load(folder)


def test_a_folder_gives_its_tasks_in_order_and_names_the_broken_ones(tmp_path: Path) -> None:
    write_task(tmp_path / "b")
    write_task(tmp_path / "a")
    write_task(tmp_path / "c", instruction_dot_md=None)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "file.txt").write_text("no task")
    tasks, broken = load_folder(tmp_path)
    assert [task.name for task in tasks] == ["a", "b"]
    assert [error.folder.name for error in broken] == ["c"]
    with pytest.raises(BrokenTask, match="no such folder of tasks"):
        load_folder(tmp_path / "nowhere")
