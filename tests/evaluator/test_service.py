"""The evaluator on a real stream, with real sandboxes: scores, retries, exclusions, and workspaces that cheat."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from shared import workspace
from shared.blobs import BlobStore
from shared.bus import Bus
from shared.config import AssessmentConfig
from shared.events import BlobRef, ExecutionAssessed, ExecutionFinished
from tests.harness.support import Run, config, processes_with, shell, write_task
from tests.sandboxes import needs_sandbox

pytestmark = needs_sandbox

FAST = AssessmentConfig(timeout_s=5.0, tries=2)


class Finished:
    """Plays the harness's part: publishes executions that finished with a given workspace."""

    def __init__(self, run: Run, bus: Bus) -> None:
        self.run, self.bus = run, bus

    async def publish(self, execution: str, task: Path, artifact: BlobRef | None, **changes: object) -> None:
        fields = {"ending": "completed", "exit_code": 0, "attempt": 1, "seconds": 1.0, "cpu_seconds": 0.1} | changes
        group = execution.split("x")[0]
        await self.bus.publish(
            ExecutionFinished(execution=execution, group=group, task=str(task), artifact=artifact, **fields)
        )

    def preserve(self, tmp_path: Path, files: dict[str, str]) -> BlobRef:
        folder = tmp_path / f"w{time.time_ns()}"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return BlobStore(self.run.folder / "blobs").put(workspace.preserve(folder).data)


@pytest.fixture
async def finished(nats_url: str, fresh_run: str, tmp_path: Path):
    run = await Run(nats_url, fresh_run, tmp_path / "run", config(shell("true"), assessment=FAST)).open()
    bus = await Bus.connect(nats_url, fresh_run, "harness")
    yield Finished(run, bus)
    await bus.close()
    await run.close()


async def assess(finished: Finished, tmp_path: Path, files: dict[str, str], test_sh: str) -> ExecutionAssessed:
    """The assessment of a workspace with `files` by the tests `test_sh`."""
    task = write_task(tmp_path / "task", test_sh)
    await finished.publish("g1x00", task, finished.preserve(tmp_path, files))
    async with finished.run.service("evaluator"):
        [assessed] = await finished.run.expect(ExecutionAssessed)
    assert not list((finished.run.folder / "work").glob("score-*"))
    return assessed


@pytest.mark.parametrize(
    ("files", "score"), [({"hello.txt": "hello\n"}, 1.0), ({"hello.txt": "no\n"}, 0.25), ({}, 0.25)]
)
async def test_the_tests_score_what_was_left(finished: Finished, tmp_path: Path, files: dict, score: float) -> None:
    test_sh = 'if [ "$(cat hello.txt)" = hello ]; then echo 1; else echo 0.25; fi > /logs/verifier/reward.txt\n'
    assessed = await assess(finished, tmp_path, files, test_sh)
    assert (assessed.status, assessed.score, assessed.tries) == ("scored", score, 1)
    assert len(assessed.artifact) == 64


async def test_a_reward_in_json_counts_too(finished: Finished, tmp_path: Path) -> None:
    assessed = await assess(finished, tmp_path, {}, "echo '{\"reward\": 0.5}' > /logs/verifier/reward.json\nexit 3\n")
    assert (assessed.status, assessed.score) == ("scored", 0.5)


@pytest.mark.parametrize(
    "test_sh",
    [
        "exit 0\n",
        "echo much > /logs/verifier/reward.txt\n",
        "echo 1.5 > /logs/verifier/reward.txt\n",
        "echo nan > /logs/verifier/reward.txt\n",
        "ln -s /etc/hostname /logs/verifier/reward.txt\n",
        "mkfifo /logs/verifier/reward.txt\n",
        "echo 1 > /logs/verifier/reward.txt; kill -9 $$\n",
    ],
)
async def test_without_a_valid_reward_it_is_tried_again_then_excluded(
    finished: Finished, tmp_path: Path, test_sh: str
) -> None:
    assessed = await assess(finished, tmp_path, {}, test_sh)
    assert (assessed.status, assessed.tries) == ("excluded", 2)
    assert "unresolved" in assessed.detail


async def test_a_failure_that_passes_is_scored_at_the_second_try(finished: Finished, tmp_path: Path) -> None:
    # The first run cannot write into /tests, so the test's own loop opens the gate once the first try is logged.
    task = write_task(tmp_path / "task", "[ -e /tests/gate ] && echo 1 > /logs/verifier/reward.txt; echo ran\n")
    await finished.publish("g1x00", task, finished.preserve(tmp_path, {}))
    log = finished.run.folder / "logs" / "assessments" / "g1x00.log"
    async with finished.run.service("evaluator"):
        async with asyncio.timeout(10):
            while not (log.exists() and "ran" in log.read_text()):
                await asyncio.sleep(0.02)
        (task / "tests" / "gate").write_text("")
        [assessed] = await finished.run.expect(ExecutionAssessed)
    assert (assessed.status, assessed.score, assessed.tries) == ("scored", 1.0, 2)


async def test_a_timeout_with_a_reward_is_scored_and_one_without_is_not(finished: Finished, tmp_path: Path) -> None:
    script = "echo 0.5 > /logs/verifier/reward.txt; sleep 600\n"
    task = write_task(tmp_path / "with", script, "[verifier]\ntimeout_sec=1\n")
    other = write_task(tmp_path / "without", "sleep 600\n", "[verifier]\ntimeout_sec=0.5\n")
    artifact = finished.preserve(tmp_path, {})
    await finished.publish("g1x00", task, artifact)
    await finished.publish("g1x01", other, artifact)
    async with finished.run.service("evaluator"):
        found = {a.execution: a for a in await finished.run.expect(ExecutionAssessed, 2)}
    assert (found["g1x00"].status, found["g1x00"].score) == ("scored", 0.5)
    assert (found["g1x01"].status, found["g1x01"].tries) == ("excluded", 2)


@pytest.mark.parametrize(
    ("ending", "status"),
    [("failed_to_start", "placeholder"), ("overall_timeout", "excluded"), ("completed", "scored")],
)
async def test_an_execution_without_a_workspace(finished: Finished, tmp_path: Path, ending: str, status: str) -> None:
    await finished.publish("g1x00", write_task(tmp_path / "task"), None, ending=ending, detail="because")
    async with finished.run.service("evaluator"):
        [assessed] = await finished.run.expect(ExecutionAssessed)
    assert (assessed.status, assessed.score, assessed.artifact) == (status, 0.0, "")
    assert "because" in assessed.detail


async def test_a_missing_artifact_is_unresolved(finished: Finished, tmp_path: Path) -> None:
    await finished.publish("g1x00", write_task(tmp_path / "task"), BlobRef("0" * 64, 10))
    async with finished.run.service("evaluator"):
        [assessed] = await finished.run.expect(ExecutionAssessed)
    assert (assessed.status, assessed.tries) == ("excluded", 2)
    assert "BlobMissing" in assessed.detail


async def test_exactly_one_assessment_though_the_work_is_delivered_again(finished: Finished, tmp_path: Path) -> None:
    task, artifact = write_task(tmp_path / "task"), finished.preserve(tmp_path, {"hello.txt": "hello"})
    for _ in range(3):
        await finished.publish("g1x00", task, artifact)
    await finished.publish("g1x01", task, artifact)
    async with finished.run.service("evaluator"), finished.run.service("evaluator"):
        await finished.run.expect(ExecutionAssessed, 2)
        await asyncio.sleep(1.0)
    assessed = [e.execution for e in await finished.run.events() if isinstance(e, ExecutionAssessed)]
    assert sorted(assessed) == ["g1x00", "g1x01"]


async def test_code_under_test_cannot_write_the_reward_afterwards(finished: Finished, tmp_path: Path) -> None:
    mark = f"0.9{time.time_ns() % 1_000_000}"
    evil = f"(setsid sh -c 'sleep {mark}; echo 1 > /logs/verifier/reward.txt' >/dev/null 2>&1 &)\nkill -9 1\n"
    test_sh = "sh ./run.sh; echo 0 > /logs/verifier/reward.txt\n"
    assessed = await assess(finished, tmp_path, {"run.sh": evil}, test_sh)
    assert (assessed.status, assessed.score) == ("scored", 0.0)
    assert processes_with(mark) == []


async def test_files_of_the_workspace_do_not_replace_tests(finished: Finished, tmp_path: Path) -> None:
    files = {"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n", "test.sh": "echo 1\n", "json.py": "exit()"}
    test_sh = "python3 /tests/check.py\n"
    task = write_task(tmp_path / "task", test_sh)
    (task / "tests" / "check.py").write_text(
        "import json, os\nassert not os.access('/tests/test.sh', os.W_OK)\n"
        "open('/logs/verifier/reward.txt', 'w').write('0.125')\n"
    )
    await finished.publish("g1x00", task, finished.preserve(tmp_path, files))
    async with finished.run.service("evaluator"):
        [assessed] = await finished.run.expect(ExecutionAssessed)
    assert (assessed.status, assessed.score) == ("scored", 0.125)


async def test_tests_have_neither_network_nor_model_api(finished: Finished, tmp_path: Path) -> None:
    test_sh = (
        "[ ! -e /run/model.sock ] && [ ! -e /run/model ] && [ \"$(ls /sys/class/net 2>/dev/null)\" = '' ] &&"
        ' [ "$(grep -c : /proc/net/dev)" = 1 ] && echo 1 > /logs/verifier/reward.txt\n'
    )
    assessed = await assess(finished, tmp_path, {}, test_sh)
    assert assessed.status == "scored"


async def test_an_interrupted_assessment_is_done_by_the_next_process(finished: Finished, tmp_path: Path) -> None:
    gate = tmp_path / "task" / "tests" / "slow"
    task = write_task(tmp_path / "task", "[ -e /tests/slow ] && sleep 30; echo 1 > /logs/verifier/reward.txt\n")
    gate.write_text("")
    await finished.publish("g1x00", task, finished.preserve(tmp_path, {}))
    async with finished.run.service("evaluator"):
        await asyncio.sleep(1.0)
    gate.unlink()
    async with finished.run.service("evaluator"):
        [assessed] = await finished.run.expect(ExecutionAssessed)
    assert (assessed.status, assessed.score) == ("scored", 1.0)
