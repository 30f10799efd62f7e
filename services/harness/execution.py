"""One delivered execution: from its work item to the durable ExecutionFinished.

Owns the outside of an attempt: workspace, key, sandbox, artifact, and the order in which they and the events happen.

Invariant: ExecutionStarted is durable before the harness runs; the artifact is durable before ExecutionFinished names
it; whatever happens, the sandbox is gone and the workspace removed when `run` returns or raises.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from services.harness.attempts import Attempt, Step, TimeLimit, ending_of, time_limit
from services.harness.profiles import Launch, Places, Profile, launch
from shared import workspace as workspaces
from shared.blobs import BlobStore
from shared.bounded_log import BoundedLog
from shared.cancelling import in_thread
from shared.config import RunConfig
from shared.events import BlobRef, ExecutionFinished, ExecutionPlaced, ExecutionStarted
from shared.sandbox import MODEL_PORT, Bubblewrap, Ended, Limits, Mount, Running, Sandbox, SandboxFailed
from shared.tasks import BrokenTask, Task

log = logging.getLogger("gyre.harness")

GRACE_S = 3.0
BACKOFF_S = 0.5
INSTRUCTION_FILE = "/run/instruction.md"


@dataclass(frozen=True)
class ModelRoute:
    """How a sandbox reaches the model API: the folder with the proxy's socket, or (host network) the proxy's URL."""

    folder: Path | None
    base_url: str


@dataclass(frozen=True)
class Surroundings:
    """What all executions of a service process share. `route` waits until a proxy is ready."""

    config: RunConfig
    run_dir: Path
    blobs: BlobStore
    tools: Bubblewrap
    profile: Profile
    route: Callable[[], Awaitable[ModelRoute]]
    publish_started: Callable[[ExecutionStarted], Awaitable[object]]
    load_task: Callable[[Path], Task]


@dataclass
class _Result:
    ended: Ended | None = None
    artifact: BlobRef | None = None
    detail: str = ""


async def run(around: Surroundings, placed: ExecutionPlaced, number: int, dispatched_at: float) -> ExecutionFinished:
    """Run attempt `number` of the execution to its end; returns what is to be published."""
    attempt = Attempt(placed.execution, number)
    folder = around.run_dir / "work" / f"{placed.execution}-{number}"
    await in_thread(_remove_leftovers, folder.parent, placed.execution, number)
    try:
        attempt, result = await _attempt(around, placed, attempt, folder, dispatched_at)
    finally:
        await in_thread(workspaces.remove, folder)
    attempt.step(Step.PUBLISH)
    return ExecutionFinished(
        execution=placed.execution,
        group=placed.group,
        task=placed.task,
        attempt=number,
        ending=attempt.ending,
        exit_code=result.ended.code if result.ended else None,
        artifact=result.artifact,
        seconds=result.ended.seconds if result.ended else 0.0,
        cpu_seconds=result.ended.cpu_seconds if result.ended else 0.0,
        detail=result.detail,
    )


async def _attempt(
    around: Surroundings, placed: ExecutionPlaced, attempt: Attempt, folder: Path, dispatched_at: float
) -> tuple[Attempt, _Result]:
    try:
        task = around.load_task(Path(placed.task))
        _refuse_visible(task, around.profile)
    except BrokenTask as error:
        return attempt.step(Step.GAVE_UP, ending="failed_to_start"), _Result(detail=str(error))
    limits, budget_s = around.config.execution, around.config.execution.overall_budget_s

    def limit() -> TimeLimit:
        return time_limit(limits.harness_time_limit_s, task.agent_timeout_s, budget_s, dispatched_at, time.time())

    output = BoundedLog(
        around.run_dir / "logs" / "executions" / f"{placed.execution}.log", f"attempt {attempt.number}, {placed.task}"
    )
    try:
        attempt, running = await _start(around, task, attempt.step(Step.BEGIN), folder, output, limit)
        if running is None:
            return attempt, _Result(detail="; ".join(attempt.failures))
        final = limit()
        try:
            ended = await running.wait(max(final.seconds, 0.0), GRACE_S)
        finally:
            await asyncio.shield(running.kill())
        ending = ending_of(ended.code, ended.stopped, final)
        attempt = attempt.step(Step.LIMIT if ended.stopped else Step.EXITED, ending=ending)
        artifact, detail = await in_thread(_preserve, around.blobs, folder / "app")
        return attempt.step(Step.PRESERVE), _Result(ended, artifact, detail)
    finally:
        output.close(attempt.ending)


async def _start(
    around: Surroundings,
    task: Task,
    attempt: Attempt,
    folder: Path,
    output: BoundedLog,
    limit: Callable[[], TimeLimit],
) -> tuple[Attempt, Running | None]:
    """A running sandbox, or the attempt with its ending if the harness never ran."""
    key = f"gyre-{secrets.token_hex(32)}"
    announced = False
    for tried in range(max(around.config.execution.start_attempts, 1)):
        if tried:
            await asyncio.sleep(BACKOFF_S * 2 ** (tried - 1))
        try:
            route = await _within(limit(), around.route())
            await in_thread(workspaces.remove, folder)
            await in_thread(workspaces.make, folder / "app", task.workspace)
            if not announced:
                await around.publish_started(_started(attempt, key, around.profile))
                announced = True
            running = await around.tools.start(
                _sandbox(around, task, folder, key, route, attempt.execution), output.write
            )
            return attempt.step(Step.STARTED), running
        except _BudgetUsedUp as error:
            return attempt.step(Step.GAVE_UP, ending="overall_timeout", failure=str(error)), None
        except (SandboxFailed, OSError) as error:
            log.warning("%s attempt %d did not start: %s", attempt.execution, attempt.number, error)
            attempt = attempt.step(Step.START_FAILED, failure=f"start {tried + 1}: {error}")
    return attempt.step(Step.GAVE_UP, ending="failed_to_start"), None


class _BudgetUsedUp(Exception):
    """There is no time left to start."""


async def _within(limit: TimeLimit, route: Awaitable[ModelRoute]) -> ModelRoute:
    try:
        async with asyncio.timeout(max(limit.seconds, 0.0)):
            return await route
    except TimeoutError:
        raise _BudgetUsedUp("no proxy became ready within the overall budget") from None


def _started(attempt: Attempt, key: str, profile: Profile) -> ExecutionStarted:
    key_hash = hashlib.blake2b(key.encode(), digest_size=32).hexdigest()
    return ExecutionStarted(
        execution=attempt.execution, attempt=attempt.number, key_hash=key_hash, harness=profile.name
    )


def _sandbox(around: Surroundings, task: Task, folder: Path, key: str, route: ModelRoute, execution: str) -> Sandbox:
    limits = around.config.execution
    places = Places(task.instruction, INSTRUCTION_FILE, route.base_url, key, around.config.model.name, execution)
    start: Launch = launch(around.profile, places)
    memory_mb = limits.memory_mb if around.profile.memory_mb is None else around.profile.memory_mb
    return Sandbox(
        command=start.command,
        workspace=folder / "app",
        env=start.env,
        mounts=(Mount(task.instruction_file, INSTRUCTION_FILE), *start.mounts),
        limits=Limits(memory_mb=memory_mb, processes=limits.processes, disk_mb=limits.disk_mb),
        model_folder=route.folder,
        supervised=True,
        host_network=route.folder is None,
    )


def route_to(folder: Path | None, proxy_url: str) -> ModelRoute:
    """Inside a sandbox without network the API is on a loopback port; with the host's network it is where it is."""
    return ModelRoute(folder, f"http://127.0.0.1:{MODEL_PORT}" if folder is not None else proxy_url.rstrip("/"))


def _preserve(blobs: BlobStore, workspace: Path) -> tuple[BlobRef | None, str]:
    try:
        preserved = workspaces.preserve(workspace)
    except workspaces.WorkspaceTooLarge as error:
        return None, str(error)
    left_out = preserved.left_out
    detail = f"not preserved (no files, folders or links): {', '.join(left_out[:10])}" if left_out else ""
    return blobs.put(preserved.data), detail


def _refuse_visible(task: Task, profile: Profile) -> None:
    """The hidden tests must not lie below anything that the sandbox shows."""
    folder = task.folder.resolve()
    for shown in (Path("/usr"), *(mount.source for mount in profile.mounts)):
        if folder.is_relative_to(shown.resolve()):
            raise BrokenTask(task.folder, f"the harness, which sees {shown}, would see its tests: move the task")


def _remove_leftovers(work: Path, execution: str, number: int) -> None:
    """Workspaces of earlier attempts, whose harness process is gone or no longer counts."""
    for earlier in range(1, number + 1):
        workspaces.remove(work / f"{execution}-{earlier}")
