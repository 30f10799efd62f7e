"""Task folders in the Harbor layout: task.toml, instruction.md, environment/, tests/.

Owns what a folder must hold to be a task. `environment/Dockerfile` is for users of containers; our sandboxes start from
a copy of `environment/workspace/` at /app. `tests/` never enters a sandbox before the harness has ended.

Invariant: a Task that `load` returned can be started and scored; anything else is a BrokenTask that names the folder
and says what is wrong with it.
"""

from __future__ import annotations

import math
import os
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTRUCTION_LIMIT = 100_000  # bytes; it must fit one command-line argument (128 KiB on Linux)


class BrokenTask(ValueError):
    """`folder` is no task: `reason` says why and what to do."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"task {folder}: {reason}")
        self.folder = folder
        self.reason = reason


@dataclass(frozen=True)
class Task:
    """One task. `agent_timeout_s` and `verifier_timeout_s` are None where task.toml asks for no limit of its own."""

    folder: Path
    instruction: str
    workspace: Path | None  # None: starts empty
    agent_timeout_s: float | None
    verifier_timeout_s: float | None
    verifier_env: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def instruction_file(self) -> Path:
        return self.folder / "instruction.md"

    @property
    def tests(self) -> Path:
        return self.folder / "tests"


def load(folder: Path) -> Task:
    """Read and check one task folder. Raises BrokenTask."""
    if not folder.is_dir():
        raise BrokenTask(folder, "there is no such folder")
    settings = _settings(folder)
    agent, verifier = _table(folder, settings, "agent"), _table(folder, settings, "verifier")
    if not (folder / "tests" / "test.sh").is_file():
        raise BrokenTask(folder, "tests/test.sh is missing: add the script that writes /logs/verifier/reward.txt")
    return Task(
        folder=folder,
        instruction=_instruction(folder),
        workspace=_workspace(folder),
        agent_timeout_s=_seconds(folder, agent, "agent"),
        verifier_timeout_s=_seconds(folder, verifier, "verifier"),
        verifier_env=_environment(folder, verifier),
    )


def load_folder(folder: Path) -> tuple[list[Task], list[BrokenTask]]:
    """All tasks that are direct sub-folders of `folder`, by name, and the broken ones among them. Raises BrokenTask if
    `folder` itself cannot be read."""
    if not folder.is_dir():
        raise BrokenTask(folder, "there is no such folder of tasks")
    tasks: list[Task] = []
    broken: list[BrokenTask] = []
    for path in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "_"))):
        try:
            tasks.append(load(path))
        except BrokenTask as error:
            broken.append(error)
    return tasks, broken


def _settings(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenTask(folder, "task.toml is missing") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BrokenTask(folder, f"task.toml is not valid TOML: {error}") from error
    except OSError as error:
        raise BrokenTask(folder, f"task.toml cannot be read: {error.strerror}") from error


def _table(folder: Path, settings: dict[str, Any], name: str) -> dict[str, Any]:
    table = settings.get(name, {})
    if not isinstance(table, dict):
        raise BrokenTask(folder, f"task.toml: {name} must be a table, [{name}]")
    return table


def _seconds(folder: Path, table: dict[str, Any], name: str) -> float | None:
    value = table.get("timeout_sec")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise BrokenTask(folder, f"task.toml: {name}.timeout_sec must be a positive number of seconds, not {value!r}")
    return float(value)


def _environment(folder: Path, verifier: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    env = verifier.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise BrokenTask(folder, "task.toml: verifier.env must be a table of strings")
    if any("${" in value for value in env.values()):
        raise BrokenTask(folder, "task.toml: verifier.env asks for variables of the host (${...})")
    return tuple(sorted(env.items()))


def _instruction(folder: Path) -> str:
    try:
        data = (folder / "instruction.md").read_bytes()
        text = data.decode("utf-8").strip()
    except FileNotFoundError:
        raise BrokenTask(folder, "instruction.md is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BrokenTask(folder, f"instruction.md cannot be read: {error}") from error
    if not text or "\0" in text:
        raise BrokenTask(folder, "instruction.md is empty" if not text else "instruction.md contains a NUL character")
    if len(data) > INSTRUCTION_LIMIT:
        raise BrokenTask(folder, f"instruction.md has more than {INSTRUCTION_LIMIT} bytes: move data to files")
    return text


def _workspace(folder: Path) -> Path | None:
    environment, workspace = folder / "environment", folder / "environment" / "workspace"
    if workspace.is_dir() and not workspace.is_symlink():
        _refuse_special_files(folder, workspace)
        return workspace
    if workspace.is_symlink() or workspace.exists():
        raise BrokenTask(folder, "environment/workspace is not a folder")
    if environment.is_dir() and any(environment.iterdir()):
        raise BrokenTask(
            folder,
            "environment/workspace/ is missing: put the starting files there (what the Dockerfile would copy to /app); "
            "images are not built",
        )
    return None


def _refuse_special_files(folder: Path, workspace: Path) -> None:
    for root, _, names in os.walk(workspace):
        for name in names:
            mode = os.lstat(os.path.join(root, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                path = os.path.relpath(os.path.join(root, name), folder)
                raise BrokenTask(folder, f"{path} is a device, socket or pipe: only files, folders and links can start")
