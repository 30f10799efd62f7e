"""Random training worlds for the trajectory tests: real events, made from one seed.

The token alphabet is tiny, so that prefixes meet by accident as well as by design.
"""

from __future__ import annotations

from random import Random

from shared.codec import pack_floats, pack_ids
from shared.config import (
    BusConfig,
    ModelConfig,
    RunConfig,
    SchedulerConfig,
    TasksConfig,
    TrainingConfig,
    to_plain,
)
from shared.events import (
    BatchOpened,
    Event,
    ExecutionAssessed,
    ExecutionDispatched,
    ExecutionFinished,
    ExecutionStarted,
    ModelCallRecorded,
    RunStarted,
    Sampling,
)
from shared.ids import call_id, execution_id, group_id
from shared.tree import CLASSES, Tree

ALPHABET = 3


def record(
    call: str,
    *,
    execution: str = "g000000x00",
    attempt: int = 1,
    parent: str = "",
    keep: int = -1,
    call_class: str = "main_task",
    inputs: list[int] | tuple[int, ...] = (),
    outputs: list[int] | tuple[int, ...] = (),
    logprobs: list[float] | None = None,
    discarded: bool = False,
    diverged: bool = False,
) -> ModelCallRecorded:
    return ModelCallRecorded(
        call=call,
        execution=execution,
        attempt=attempt,
        cell=0,
        parent=parent,
        keep=keep,
        call_class=call_class,
        input_ids=pack_ids(list(inputs)),
        output_ids=pack_ids(list(outputs)),
        output_logprobs=pack_floats(logprobs if logprobs is not None else [-0.5] * len(outputs)),
        versions=(),
        finish_reason="stop",
        sampling=Sampling(),
        discarded=discarded,
        diverged=diverged,
    )


def tree_of(*records: ModelCallRecorded) -> Tree:
    tree = Tree()
    for one in records:
        tree.add(one)
    return tree


def random_records(rng: Random, execution: str, attempt: int, calls: int) -> list[ModelCallRecorded]:
    """Calls that continue, branch inside, or ignore earlier ones; every class, some discarded, some empty."""
    records: list[ModelCallRecorded] = []
    tree = Tree()
    for number in range(calls):
        parent = rng.choice(records).call if records and rng.random() < 0.8 else ""
        keep = rng.randint(0, tree.nodes[parent].length) if parent and rng.random() < 0.4 else -1
        outputs = [rng.randrange(ALPHABET) for _ in range(rng.randint(0, 5))]
        one = record(
            call_id(execution, attempt, number),
            execution=execution,
            attempt=attempt,
            parent=parent,
            keep=keep,
            call_class=rng.choices(CLASSES, (5, 1, 2, 1, 1))[0],
            inputs=[rng.randrange(ALPHABET) for _ in range(rng.randint(0, 4))],
            outputs=outputs,
            logprobs=[-rng.random() for _ in outputs],
            discarded=rng.random() < 0.15,
        )
        records.append(one)
        tree.add(one)
    return records


def run_started(*, run: str = "r", run_dir: str = "/r", **settings: int | bool) -> RunStarted:
    """`settings`: n, j_max, budget, std, seed, blob_threshold."""
    config = RunConfig(
        name="test",
        seed=int(settings.get("seed", 7)),
        model=ModelConfig(path="model"),
        tasks=TasksConfig(train="tasks"),
        scheduler=SchedulerConfig(executions_per_group=int(settings.get("n", 4))),
        training=TrainingConfig(
            paths_per_execution=int(settings.get("j_max", 5)),
            micro_step_tokens=int(settings.get("budget", 64)),
            advantage_std=bool(settings.get("std", True)),
        ),
        bus=BusConfig(blob_threshold_bytes=int(settings.get("blob_threshold", 1 << 18))),
    )
    return RunStarted(
        run=run, config=to_plain(config), run_dir=run_dir, train_tasks=("/t",), eval_tasks={}, started_at=0.0
    )


def dispatched(group: int, index: int, *, version: int = 0, purpose: str = "train") -> ExecutionDispatched:
    name = group_id(group)
    return ExecutionDispatched(
        execution=execution_id(name, index),
        group=name,
        index=index,
        task="/t",
        purpose=purpose,
        policy_version=version,
    )


def started(execution: str, attempt: int = 1) -> ExecutionStarted:
    return ExecutionStarted(execution=execution, attempt=attempt, key_hash="", harness="scout")


def finished(execution: str, attempt: int = 1, ending: str = "completed") -> ExecutionFinished:
    return ExecutionFinished(
        execution=execution,
        group=execution[:7],
        task="/t",
        attempt=attempt,
        ending=ending,
        exit_code=0,
        artifact=None,
        seconds=1.0,
        cpu_seconds=1.0,
    )


def assessed(execution: str, score: float, attempt: int = 1, status: str = "scored") -> ExecutionAssessed:
    return ExecutionAssessed(
        execution=execution,
        group=execution[:7],
        attempt=attempt,
        artifact="",
        branch="",
        status=status,
        score=score,
        tries=1,
        seconds=0.0,
    )


def opened(batch: int, groups: int, *, attempt: int = 1, base_version: int | None = None) -> BatchOpened:
    version = batch - 1 if base_version is None else base_version
    return BatchOpened(batch=batch, attempt=attempt, base_version=version, groups=groups, burst=1)


def random_execution(rng: Random, group: int, index: int, calls: int) -> list[Event]:
    """One execution's whole life: now and then several attempts, exclusion, or a placeholder."""
    first = dispatched(group, index, version=group // 3)
    name = first.execution
    events: list[Event] = [first]
    if rng.random() < 0.1:
        return [*events, finished(name, 1, "failed_to_start"), assessed(name, 0.0, 1, "placeholder")]
    attempts = 1 + (rng.random() < 0.25)
    for attempt in range(1, attempts + 1):
        events.append(started(name, attempt))
        events += random_records(rng, name, attempt, rng.randint(0, calls))
        if attempt < attempts and rng.random() < 0.5:
            events.append(finished(name, attempt))
    if attempts > 1 and rng.random() < 0.5:
        events.append(assessed(name, 1.0, 1))  # of an attempt that is history
    events.append(finished(name, attempts))
    status = "excluded" if rng.random() < 0.1 else "scored"
    events.append(assessed(name, rng.choice((0.0, 0.25, 0.5, 1.0)), attempts, status))
    return events


def interleave(rng: Random, lives: list[list[Event]]) -> list[Event]:
    """One random merge that keeps the order inside each life."""
    cursors = [0] * len(lives)
    merged: list[Event] = []
    left = [i for i, life in enumerate(lives) for _ in life]
    rng.shuffle(left)
    for i in left:
        merged.append(lives[i][cursors[i]])
        cursors[i] += 1
    return merged


def random_stream(rng: Random, *, groups: int, n: int, batches: int, per_batch: int, **settings: int) -> list[Event]:
    """A run with `groups` groups of `n`, some side by side and some one after the other; the batches open (some of them
    twice) anywhere in it, in order."""
    events: list[Event] = []
    wave: list[list[Event]] = []
    for group in range(groups):
        wave += [random_execution(rng, group, i, 8) for i in range(n)]
        if group == groups - 1 or rng.random() < 0.6:
            events += interleave(rng, wave)
            wave = []
    places = sorted((rng.randint(0, len(events)) for _ in range(batches)), reverse=True)
    for batch, place in zip(range(batches, 0, -1), places, strict=True):
        if rng.random() < 0.3:
            events.insert(rng.randint(place, len(events)), opened(batch, per_batch, attempt=2))
        events.insert(place, opened(batch, per_batch))
    return [run_started(n=n, **settings), *events]
