"""What must hold between the values of a run file, and between them and the disk.

Invariant: `problems_of` reads nothing but the folders that the configuration names, changes nothing, and reports all
problems, not only the first. Each is (key, value, fix).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared import ids
from shared.config import RunConfig

Found = tuple[str, Any, str]

POSITIVE = (
    "model.context",
    "execution.harness_time_limit_s",
    "execution.overall_budget_s",
    "execution.start_attempts",
    "execution.processes",
    "execution.disk_mb",
    "assessment.timeout_s",
    "assessment.tries",
    "assessment.workers",
    "sampling.top_p",
    "sampling.max_new_tokens",
    "cells.count",
    "cells.capacity",
    "cells.tensor_parallel",
    "cells.pipeline_parallel",
    "cells.context_parallel",
    "cells.engine_page",
    "cells.threads",
    "cells.start_timeout_s",
    "cells.handover_timeout_s",
    "cells.handover_hold_s",
    "scheduler.mu",
    "scheduler.groups_per_batch",
    "scheduler.executions_per_group",
    "scheduler.async_training_cells",
    "training.learning_rate",
    "training.token_weight_cap",
    "training.paths_per_execution",
    "training.micro_step_tokens",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "proxy.call_timeout_s",
    "bus.blob_threshold_bytes",
)
NOT_NEGATIVE = (
    "tasks.limit",
    "execution.memory_mb",
    "sampling.temperature",
    "cells.standalone",
    "cells.engine_tokens",
    "scheduler.phi",
    "scheduler.supply_fraction",
    "scheduler.supply_hold_s",
    "training.steps",
    "training.adam_eps",
    "training.weight_decay",
    "training.warmup_steps",
    "training.clip_grad",
    "proxy.port",
    "proxy.progress_tokens",
    "telemetry.prometheus_port",
)


def problems_of(config: RunConfig) -> Iterator[Found]:
    """Everything that is wrong with a configuration whose keys and types are right and whose paths are absolute."""
    yield from _ranges(config)
    yield from _model(config)
    yield from _tasks(config)
    yield from _harness(config)
    yield from _scheduler(config)
    yield from _training(config)


def _get(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _ranges(config: RunConfig) -> Iterator[Found]:
    for key in POSITIVE:
        if not _get(config, key) > 0:
            yield key, _get(config, key), "must be greater than 0"
    for key in NOT_NEGATIVE:
        if not _get(config, key) >= 0:
            yield key, _get(config, key), "must not be negative"
    for key in ("proxy.port", "telemetry.prometheus_port"):
        if _get(config, key) > 65535:
            yield key, _get(config, key), "must be a port: 0 to 65535"
    if config.sampling.top_p > 1:
        yield "sampling.top_p", config.sampling.top_p, "must be at most 1"
    if config.cells.handover_hold_s <= config.cells.handover_timeout_s:
        fix = f"must exceed cells.handover_timeout_s = {config.cells.handover_timeout_s:g}, in which pages are read"
        yield "cells.handover_hold_s", config.cells.handover_hold_s, fix
    if config.scheduler.supply_fraction > 1:
        yield "scheduler.supply_fraction", config.scheduler.supply_fraction, "is a fraction of a batch: at most 1"
    if not ids.TOKEN.match(config.name):
        yield "name", config.name, "must be of letters, digits, '-' and '_' only: it becomes part of the run id"


# ---------------------------------------------------------------------------------------------------------------- model


def _model(config: RunConfig) -> Iterator[Found]:
    folder = Path(config.model.path)
    if not folder.is_dir():
        yield "model.path", str(folder), "is no folder: give one in Hugging Face layout (config.json, *.safetensors)"
        return
    try:
        shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        fix = f"has no readable config.json ({error.strerror}): name the folder of a Hugging Face model"
        yield "model.path", str(folder), fix
        return
    except ValueError as error:
        yield "model.path", str(folder), f"has a config.json that is no JSON ({error}): fetch the model again"
        return
    if not isinstance(shape, dict):
        yield "model.path", str(folder), "has a config.json that is no JSON object: fetch the model again"
        return
    if not any(folder.glob("*.safetensors")):
        yield "model.path", config.model.path, "has no *.safetensors: save the weights with save_pretrained"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        yield "model.path", config.model.path, "has no tokenizer (tokenizer.json): save it into the same folder"
    shape = {**shape, **(shape.get("text_config") or {})}
    yield from _context(config, shape)
    yield from _layout(config, shape)


def _context(config: RunConfig, shape: dict[str, Any]) -> Iterator[Found]:
    longest, context = shape.get("max_position_embeddings"), config.model.context
    if isinstance(longest, int) and context > longest:
        yield "model.context", context, f"is longer than the model's max_position_embeddings: at most {longest}"
    if config.sampling.max_new_tokens >= context:
        fix = f"leaves no room for a prompt in model.context = {context}: make it smaller"
        yield "sampling.max_new_tokens", config.sampling.max_new_tokens, fix
    if 0 < config.cells.engine_tokens < context:
        fix = f"cannot hold one call of model.context = {context}: at least {context}"
        yield "cells.engine_tokens", config.cells.engine_tokens, fix


def _layout(config: RunConfig, shape: dict[str, Any]) -> Iterator[Found]:
    """A cell's tensor and pipeline parallel ranks must share heads and layers evenly."""
    tensor, pipeline = config.cells.tensor_parallel, config.cells.pipeline_parallel
    if tensor < 1 or pipeline < 1:
        return
    heads = shape.get("num_attention_heads")
    shared_out = {
        "num_attention_heads": heads,
        "num_key_value_heads": shape.get("num_key_value_heads", heads),
        "intermediate_size": shape.get("intermediate_size"),
    }
    yield from _divides("cells.tensor_parallel", tensor, shared_out)
    yield from _divides("cells.pipeline_parallel", pipeline, {"num_hidden_layers": shape.get("num_hidden_layers")})


def _divides(key: str, ranks: int, counts: dict[str, Any]) -> Iterator[Found]:
    known = {name: count for name, count in counts.items() if isinstance(count, int)}
    uneven = [f"{name} = {count}" for name, count in known.items() if count % ranks]
    if uneven:
        common = math.gcd(*known.values())
        fits = " or ".join(str(n) for n in range(1, min(common, 64) + 1) if common % n == 0)
        yield key, ranks, f"does not divide the model's {', '.join(uneven)}: use {fits}"


# ---------------------------------------------------------------------------------------------------------------- tasks


def _tasks(config: RunConfig) -> Iterator[Found]:
    yield from _task_folder("tasks.train", config.tasks.train)
    names: set[str] = set()
    for i, one in enumerate(config.evaluation.sets):
        key = f"evaluation.sets[{i}]"
        yield from _task_folder(f"{key}.tasks", one.tasks)
        if one.name in names:
            yield f"{key}.name", one.name, "stands twice: each evaluation set needs a name of its own"
        names.add(one.name)
        if not ids.TOKEN.match(one.name):
            yield f"{key}.name", one.name, "must be of letters, digits, '-' and '_' only"
        if one.executions < 1:
            yield f"{key}.executions", one.executions, "must be greater than 0"
        if one.temperature < 0:
            yield f"{key}.temperature", one.temperature, "must not be negative (0 is greedy)"
        if not one.when:
            yield f"{key}.when", list(one.when), "names no time: use before, after or both, or remove the set"
    main = config.evaluation.main
    if main and main not in names:
        known = ", ".join(sorted(names)) or "none"
        yield "evaluation.main", main, f"is no evaluation set: use one of evaluation.sets[].name ({known})"


def _task_folder(key: str, path: str) -> Iterator[Found]:
    folder = Path(path)
    if not folder.is_dir():
        yield key, path, "is no folder: give one whose sub-folders are tasks (task.toml, instruction.md, ...)"
    elif not any(folder.glob("*/task.toml")):
        yield key, path, "holds no task (no */task.toml): generate the tasks or name the right folder"


def _harness(config: RunConfig) -> Iterator[Found]:
    if config.execution.harness_time_limit_s > config.execution.overall_budget_s:
        fix = f"must cover execution.harness_time_limit_s = {config.execution.harness_time_limit_s:g}: make it larger"
        yield "execution.overall_budget_s", config.execution.overall_budget_s, fix
    for i, mount in enumerate(config.harness.mounts):
        if not Path(mount).exists():
            yield f"harness.mounts[{i}]", mount, "does not exist: remove it or install what it should hold"


# ------------------------------------------------------------------------------------------------- scheduler, training


def _scheduler(config: RunConfig) -> Iterator[Found]:
    """Batches that could never fill, or never be served by the cells that roll out."""
    cells, plan = config.cells, config.scheduler
    if min(cells.count, cells.capacity, plan.groups_per_batch, plan.executions_per_group, plan.mu) < 1 or plan.phi < 0:
        return
    if cells.standalone < 0:
        return
    most = min(cells.count, cells.engines - 1)
    if plan.mode == "async" and plan.async_training_cells > most:
        fix = f"leaves no cell for rollout out of cells.count = {cells.count}: at most {most}"
        if cells.standalone:
            fix = f"exceeds cells.count = {cells.count}: standalone engines never train"
        yield "scheduler.async_training_cells", plan.async_training_cells, fix
        return
    rollout = cells.engines - (plan.async_training_cells if plan.mode == "async" else 0)
    capacity, batch = rollout * cells.capacity, plan.groups_per_batch * plan.executions_per_group
    if plan.executions_per_group > capacity:
        fix = f"one group alone exceeds the {capacity} executions that the rollout cells serve: at most {capacity}"
        yield "scheduler.executions_per_group", plan.executions_per_group, fix
    elif batch > cells.engines * cells.capacity:  # with fewer cells in rollout (mode async) executions queue
        capacity = cells.engines * cells.capacity
        fix = (
            f"a batch is {plan.groups_per_batch} groups x {plan.executions_per_group} executions = {batch}, beyond the "
            f"{capacity} that {cells.engines} cells x cells.capacity = {cells.capacity} serve at once: use at most "
            f"{capacity // plan.executions_per_group} groups, or raise cells.capacity to {-(-batch // cells.engines)}"
        )
        yield "scheduler.groups_per_batch", plan.groups_per_batch, fix


def _training(config: RunConfig) -> Iterator[Found]:
    recipe = config.training
    for key in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(recipe, key) < 1:
            yield f"training.{key}", getattr(recipe, key), "must be at least 0 and less than 1"
    if recipe.sequence_clip_low > recipe.sequence_clip_high:
        fix = f"is above training.sequence_clip_high = {recipe.sequence_clip_high}: swap them"
        yield "training.sequence_clip_low", recipe.sequence_clip_low, fix
