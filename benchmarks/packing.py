"""How well the trajectory service packs, and what it costs: fill rate, shared tokens, CPU time.

    python -m benchmarks.packing [--workload demo|coding|million] [--budget TOKENS] [--seed N]

The executions are generated in the shape of agent runs: a system prompt shared by all groups, a task prompt shared by
a group, turns of tool output and generation, compactions that open a new window with a summary, sub-agents with a
prompt of their own, a reply changed by the harness now and then. They go through the real core as events. One JSON
object is printed:

- `fill_rate`: packed tokens / (micro-steps x budget), over micro-steps within the budget; `over_budget` counts the
  others, single paths that are longer.
- `dedup_factor`: tokens of the selected paths / packed tokens. `dedup_bound`: the same with one micro-step of any size
  per group, the most that sharing inside a group can give (sharing between groups comes on top).
- `cpu_s`, CPU time of this process: `records` (building trees), `batch` (selection, advantages, packing, encoding).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from services.trajectory.core import TrajectoryCore
from services.trajectory.packing import TrainPath, pack
from services.trajectory.selection import select
from shared.actor import Publish, Wake
from shared.codec import pack_floats, pack_ids
from shared.config import ModelConfig, RunConfig, SchedulerConfig, TasksConfig, TrainingConfig, to_plain
from shared.events import (
    BatchOpened,
    Event,
    ExecutionAssessed,
    ExecutionDispatched,
    ExecutionFinished,
    ExecutionStarted,
    MicroStepReady,
    ModelCallRecorded,
    RunStarted,
    Sampling,
    TimerFired,
)
from shared.ids import call_id, execution_id, group_id
from shared.tree import Tree

Ids = npt.NDArray[np.int32]
VOCABULARY = 150_000
J_MAX = 5
EVERYTHING = 1 << 60


@dataclass(frozen=True)
class Workload:
    groups: int
    executions: int
    budget: int
    system: int  # tokens of the system prompt, shared by all groups
    task: int  # tokens of the task prompt, shared by the group
    calls: tuple[int, int]  # main calls of one execution, from .. to
    output: int  # mean generated tokens of a call
    tool: int  # mean tokens of a tool result
    window: int  # context length at which it compacts
    sub_agents: float  # chance per call


WORKLOADS = {
    "demo": Workload(8, 8, 4096, 150, 60, (1, 6), 30, 40, 2048, 0.05),
    "coding": Workload(4, 16, 131_072, 8_000, 1_500, (20, 120), 250, 600, 60_000, 0.03),
    "million": Workload(1, 16, 262_144, 15_000, 3_000, (800, 900), 300, 850, 200_000, 0.02),
}


def measure(name: str, load: Workload, seed: int) -> dict[str, object]:
    core = TrajectoryCore()
    core.handle(_run_started(load, seed), 0.0)
    cpu = {"records": 0.0, "batch": 0.0}
    recorded = generated = calls = 0
    bound = paths = 0
    stem = _tokens(np.random.default_rng(seed), load.system)
    for number in range(load.groups):
        group = list(_group(load, number, seed, stem))
        for event in group:
            start = time.process_time()
            core.handle(event, 0.0)
            cpu["records"] += time.process_time() - start
            if isinstance(event, ModelCallRecorded):
                calls += 1
                recorded += (len(event.input_ids) + len(event.output_ids)) // 4
                generated += len(event.output_ids) // 4
        size, count = _bound(group, seed)
        bound, paths = bound + size, paths + count
    steps, cpu["batch"] = _train(core, load)
    within = [s for s in steps if s.tokens <= load.budget]
    packed, path_tokens = sum(s.tokens for s in steps), sum(s.path_tokens for s in steps)
    return {
        "workload": name,
        "budget": load.budget,
        "groups": load.groups,
        "executions": load.groups * load.executions,
        "calls": calls,
        "tokens": {
            "recorded": recorded,
            "generated": generated,
            "trained": sum(s.trained_tokens for s in steps),
            "paths": path_tokens,
            "packed": packed,
        },
        "paths": paths,
        "micro_steps": len(steps),
        "over_budget": len(steps) - len(within),
        "fill_rate": round(sum(s.tokens for s in within) / (len(within) * load.budget), 4) if within else None,
        "dedup_factor": round(path_tokens / packed, 3),
        "dedup_bound": round(path_tokens / bound, 3),
        "payload_bytes": sum(len(s.payload or b"") for s in steps),
        "cpu_s": {key: round(value, 3) for key, value in cpu.items()},
        "packed_tokens_per_cpu_s": round(packed / cpu["batch"]),
    }


def _train(core: TrajectoryCore, load: Workload) -> tuple[list[MicroStepReady], float]:
    """Open one batch for all groups; (its micro-steps, CPU seconds)."""
    start = time.process_time()
    effects = list(core.handle(BatchOpened(batch=1, attempt=1, base_version=0, groups=load.groups, burst=1), 0.0))
    while isinstance(wake := effects[-1], Wake):
        effects[-1:] = core.handle(TimerFired(service="trajectory", key=wake.key), 0.0)
    spent = time.process_time() - start
    events = [effect.event for effect in effects if isinstance(effect, Publish)]
    return [event for event in events if isinstance(event, MicroStepReady)], spent


def _bound(group: list[Event], seed: int) -> tuple[int, int]:
    """(tokens of the group's paths in one trie, number of paths)."""
    trees: dict[str, Tree] = {}
    for event in group:
        if isinstance(event, ModelCallRecorded):
            trees.setdefault(event.execution, Tree()).add(event)
    paths = [
        TrainPath("", name, s.leaf, 0.0, 0.0, pack_ids(s.ids), b"", b"")
        for name, tree in trees.items()
        for s in select(tree, name, seed=seed, j_max=J_MAX)
    ]
    return pack([], paths, EVERYTHING)[0].tokens, len(paths)


# ------------------------------------------------------------------------------------------------ generated executions


def _group(load: Workload, number: int, seed: int, stem: Ids) -> Iterator[Event]:
    name = group_id(number)
    task = _tokens(np.random.default_rng([seed, number]), load.task)
    for index in range(load.executions):
        execution = execution_id(name, index)
        yield ExecutionDispatched(
            execution=execution, group=name, index=index, task="", purpose="train", policy_version=0
        )
        yield ExecutionStarted(execution=execution, attempt=1, key_hash="", harness="generated")
        yield from _Agent(load, execution, [seed, number, index], np.concatenate([stem, task])).run()
        yield ExecutionFinished(
            execution=execution,
            group=name,
            task="",
            attempt=1,
            ending="completed",
            exit_code=0,
            artifact=None,
            seconds=0.0,
            cpu_seconds=0.0,
        )
        yield ExecutionAssessed(
            execution=execution,
            group=name,
            attempt=1,
            artifact="",
            branch="",
            status="scored",
            score=(index * 7 % load.executions) / load.executions,
            tries=1,
            seconds=0.0,
        )


class _Agent:
    """One generated execution."""

    def __init__(self, load: Workload, execution: str, seed: list[int], prompt: Ids) -> None:
        self.load, self.execution, self.prompt = load, execution, prompt
        self.rng, self.numbers = Random(str(seed)), np.random.default_rng(seed)
        self.count = 0

    def run(self) -> Iterator[ModelCallRecorded]:
        parent, length, new = "", 0, self.prompt
        for _ in range(self.rng.randint(*self.load.calls)):
            keep = -1
            if parent and self.rng.random() < 0.01:  # the harness changed the end of the last reply
                keep = length = length - 3
            one = self._call(parent, keep, new, "main_task")
            yield one
            parent, length = one.call, length + len(new) + len(one.output_ids) // 4
            new = self._some(self.load.tool)
            if self.rng.random() < self.load.sub_agents:
                yield from self._sub_agent()
            if length > self.load.window:
                summary = self._call(parent, -1, self._some(50), "main_summary")
                yield summary
                new = np.concatenate([self.prompt, np.frombuffer(summary.output_ids, np.int32), new])
                parent, length = "", 0

    def _sub_agent(self) -> Iterator[ModelCallRecorded]:
        parent, new = "", np.concatenate([self.prompt[: self.load.system // 2], self._some(self.load.task)])
        for _ in range(self.rng.randint(1, 6)):
            one = self._call(parent, -1, new, "sub_task")
            yield one
            parent, new = one.call, self._some(self.load.tool)

    def _call(self, parent: str, keep: int, new: Ids, call_class: str) -> ModelCallRecorded:
        output = self._some(self.load.output)
        self.count += 1
        return ModelCallRecorded(
            call=call_id(self.execution, 1, self.count),
            execution=self.execution,
            attempt=1,
            cell=0,
            parent=parent,
            keep=keep,
            call_class=call_class,
            input_ids=pack_ids(new),
            output_ids=pack_ids(output),
            output_logprobs=pack_floats(np.full(len(output), -0.5)),
            versions=(),
            finish_reason="stop",
            sampling=Sampling(),
        )

    def _some(self, mean: int) -> Ids:
        return _tokens(self.numbers, max(4, int(self.rng.expovariate(1 / mean))))


def _tokens(rng: np.random.Generator, n: int) -> Ids:
    return rng.integers(0, VOCABULARY, n, dtype=np.int32)


def _run_started(load: Workload, seed: int) -> RunStarted:
    config = RunConfig(
        name="packing",
        seed=seed,
        model=ModelConfig(path=""),
        tasks=TasksConfig(train=""),
        scheduler=SchedulerConfig(executions_per_group=load.executions),
        training=TrainingConfig(paths_per_execution=J_MAX, micro_step_tokens=load.budget),
    )
    return RunStarted(run="packing", config=to_plain(config), run_dir="", train_tasks=(), eval_tasks={}, started_at=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="demo")
    parser.add_argument("--budget", type=int, help="packed tokens of one micro-step; default: the workload's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    load = WORKLOADS[args.workload]
    if args.budget:
        load = Workload(**{**load.__dict__, "budget": args.budget})
    print(json.dumps(measure(args.workload, load, args.seed)))


if __name__ == "__main__":
    main()
