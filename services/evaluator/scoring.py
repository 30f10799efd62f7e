"""One run of a task's tests on a preserved workspace.

The workspace is unpacked into a fresh folder; the tests are the task folder's own, mounted read-only at /tests only
now; there is no network and no model API. The reward is read after the last process in the sandbox is gone, so nothing
that the workspace left running can still write it. A test script that a signal ended (other than by our time limit) has
not said its last word: whatever reward it left is not taken.

What this cannot prevent: code under test runs as the same user as the script that calls it. Tests should write the
reward as the last thing they do, import nothing by a name that /app could shadow (/tests comes first when the script
runs `python3 /tests/x.py`, /app when it runs `python3 -m x`), and run untrusted code in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.evaluator.verdict import Outcome, Reward, Unresolved, read_reward
from shared import workspace as workspaces
from shared.blobs import BlobCorrupt, BlobMissing, BlobStore
from shared.cancelling import in_thread
from shared.events import BlobRef
from shared.sandbox import Bubblewrap, Limits, Mount, Sandbox, SandboxFailed
from shared.tasks import Task

TESTS = "/tests"
LOGS = "/logs/verifier"
REWARD_LIMIT = 65536  # bytes of a reward file
ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/tmp",  # not the workspace: its dot files configure nothing here
    "TMPDIR": "/tmp",
    "USER": "agent",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
}


@dataclass(frozen=True)
class Examination:
    """What one test run needs. `folder` is made and removed by it."""

    task: Task
    artifact: BlobRef
    folder: Path
    limits: Limits
    timeout_s: float


async def score(
    tools: Bubblewrap, blobs: BlobStore, examination: Examination, output: Callable[[bytes], None]
) -> Outcome:
    """Run the tests once. Every failure that is not a test result is Unresolved."""
    folder = examination.folder
    try:
        await in_thread(_prepare, blobs, examination)
        running = await tools.start(_sandbox(examination), output)
        try:
            ended = await running.wait(examination.timeout_s)
        finally:
            await running.kill()
        if ended.signal and not ended.stopped:
            return Unresolved(f"signal {ended.signal} ended the test script")
        outcome = read_reward(*await in_thread(_rewards, folder / "logs"))
    except (SandboxFailed, BlobMissing, BlobCorrupt, workspaces.ArchiveRefused, OSError) as error:
        return Unresolved(f"{type(error).__name__}: {error}")
    finally:
        await in_thread(workspaces.remove, folder)
    how = f"the tests were stopped after {examination.timeout_s:g} s" if ended.stopped else f"exit {ended.code}"
    return Reward(outcome.score, how) if isinstance(outcome, Reward) else Unresolved(f"{outcome.reason} ({how})")


def _prepare(blobs: BlobStore, examination: Examination) -> None:
    workspaces.remove(examination.folder)
    workspaces.unpack(blobs.get(examination.artifact), examination.folder / "app")
    (examination.folder / "logs").mkdir()


def _sandbox(examination: Examination) -> Sandbox:
    task, folder = examination.task, examination.folder
    shell = "/bin/bash" if shutil.which("bash", path="/usr/bin:/bin") else "/bin/sh"
    return Sandbox(
        command=(shell, f"{TESTS}/test.sh"),
        workspace=folder / "app",
        env={**ENV, **dict(task.verifier_env)},
        mounts=(Mount(task.tests.resolve(), TESTS), Mount(folder / "logs", LOGS, writable=True)),
        limits=examination.limits,
    )


def _rewards(logs: Path) -> tuple[bytes | None, bytes | None]:
    return _contents(logs / "reward.txt"), _contents(logs / "reward.json")


def _contents(path: Path) -> bytes | None:
    """A regular file's bytes; None if there is none. Links and pipes are none: they lead out of the folder."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        return file.read(REWARD_LIMIT)
