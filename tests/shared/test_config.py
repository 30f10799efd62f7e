"""Run files: what loads, and what is refused with key, value and fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from shared.config import RunConfig, from_plain, load, to_plain
from shared.config_check import ConfigError
from shared.config_rules import NOT_NEGATIVE, POSITIVE

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "max_position_embeddings": 4096,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
}


def write_run(folder: Path, **sections: Any) -> Path:
    """A run file with a model and tasks that exist; `sections` are put over it, None removes one."""
    model, task = folder / "model", folder / "tasks" / "one"
    model.mkdir(parents=True, exist_ok=True)
    task.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "model.safetensors").write_bytes(b"")
    (model / "tokenizer.json").write_text("{}")
    (task / "task.toml").write_text("")
    plain: dict[str, Any] = {
        "name": "test",
        "model": {"path": "model"},
        "tasks": {"train": "tasks"},
        "scheduler": {"groups_per_batch": 4, "executions_per_group": 8},
    }
    plain.update(sections)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in plain.items() if v is not None}))
    return path


def problems(path: Path, **overrides: Any) -> dict[str, str]:
    """Key -> fix of everything that `load` finds; `a__b=1` overrides a.b."""
    with pytest.raises(ConfigError) as caught:
        load(path, {key.replace("__", "."): value for key, value in overrides.items()})
    for problem in caught.value.problems:
        assert problem.key in str(caught.value)
        assert problem.fix in str(caught.value)
    return {problem.key: problem.fix for problem in caught.value.problems}


def test_a_good_file_loads_with_paths_from_its_folder_and_survives_the_way_through_an_event(tmp_path: Path) -> None:
    config = load(write_run(tmp_path))
    assert config.model.path == str(tmp_path / "model")
    assert config.tasks.train == str(tmp_path / "tasks")
    assert config.training.steps == 48
    plain = to_plain(config)
    assert from_plain(json.loads(json.dumps(plain))) == config


def test_overrides_replace_and_add_keys(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    config = load(path, {"training.steps": 2, "scheduler.mode": "async", "name": "other"})
    assert (config.training.steps, config.scheduler.mode, config.name) == (2, "async", "other")
    assert "did you mean `steps`" in problems(path, training__stepps=2)["training.stepps"]
    assert "no section" in problems(path, name__x=1)["name.x"]


def test_numbers_may_be_written_as_people_write_them(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    path.write_text(path.read_text() + "training:\n  learning_rate: 3e-4\n  warmup_steps: 4\n")
    assert load(path).training.learning_rate == 3e-4


def test_unknown_missing_and_wrong_keys_are_reported_together(tmp_path: Path) -> None:
    found = problems(
        write_run(
            tmp_path,
            modle={},
            model={"path": "model", "contxt": 1, "dtype": "float8"},
            tasks={},
            cells={"count": "three"},
            evaluation={"sets": [{"name": "a", "task": "x", "executions": 1.5}]},
            training=[1],
        )
    )
    assert "did you mean `model`" in found["modle"]
    assert "did you mean `context`" in found["model.contxt"]
    assert "float8" in found["model.dtype"]
    assert "missing" in found["tasks.train"]
    assert "expected `int`, got `str`" in found["cells.count"]
    assert "did you mean `tasks`" in found["evaluation.sets[0].task"]
    assert "missing" in found["evaluation.sets[0].tasks"]
    assert "expected `int`" in found["evaluation.sets[0].executions"]
    assert "section" in found["training"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("name: [", "no YAML"), ("- a", "mapping"), ("", "mapping"), ("name: a\nname: b", "stands twice")],
)
def test_what_is_no_run_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load(path)
    with pytest.raises(ConfigError, match="check the path"):
        load(tmp_path / "none.yaml")


def test_missing_folders_are_named(tmp_path: Path) -> None:
    found = problems(
        write_run(
            tmp_path,
            model={"path": "nowhere"},
            tasks={"train": "neither"},
            evaluation={"sets": [{"name": "a", "tasks": "model", "executions": 4}], "main": "b"},
            harness={"mounts": ["/no/such/place"]},
        )
    )
    assert "is no folder" in found["model.path"]
    assert "is no folder" in found["tasks.train"]
    assert "holds no task" in found["evaluation.sets[0].tasks"]
    assert "(a)" in found["evaluation.main"]
    assert "does not exist" in found["harness.mounts[0]"]


@pytest.mark.parametrize(("text", "reason"), [("{", "no JSON"), ("[]", "no JSON object")])
def test_a_model_that_cannot_be_loaded_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = write_run(tmp_path)
    (tmp_path / "model" / "config.json").write_text(text)
    assert reason in problems(path)["model.path"]
    (tmp_path / "model" / "config.json").unlink()
    assert "config.json" in problems(path)["model.path"]


def test_a_model_without_weights_or_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "safetensors" in problems(path)["model.path"]


def test_layouts_that_cells_cannot_hold_are_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    load(path, {"cells.tensor_parallel": 2, "cells.pipeline_parallel": 4})
    assert (
        "num_key_value_heads = 2, intermediate_size = 512: use 1 or 2"
        in problems(path, cells__tensor_parallel=3)["cells.tensor_parallel"]
    )
    assert "num_hidden_layers = 4" in problems(path, cells__pipeline_parallel=3)["cells.pipeline_parallel"]
    assert "at most 4096" in problems(path, model__context=5000)["model.context"]
    assert "no room" in problems(path, sampling__max_new_tokens=4096)["sampling.max_new_tokens"]
    assert "at least 4096" in problems(path, cells__engine_tokens=100)["cells.engine_tokens"]


def test_batches_that_cannot_fit_are_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path)  # 3 cells x 32 = 96 executions at once
    load(path, {"scheduler.groups_per_batch": 12})
    too_many = problems(path, scheduler__groups_per_batch=13)["scheduler.groups_per_batch"]
    assert "13 groups x 8 executions = 104" in too_many
    assert "at most 12" in too_many
    assert "at most 96" in problems(path, scheduler__executions_per_group=97)["scheduler.executions_per_group"]
    load(path, {"scheduler.mode": "async", "scheduler.groups_per_batch": 12})  # 64 places in rollout: the rest queues
    asynchronous = {"scheduler__mode": "async", "scheduler__groups_per_batch": 13}
    assert "3 cells" in problems(path, **asynchronous)["scheduler.groups_per_batch"]
    alone = problems(path, scheduler__mode="async", scheduler__async_training_cells=3)
    assert "at most 2" in alone["scheduler.async_training_cells"]
    load(path, {"scheduler.mode": "async", "scheduler.async_training_cells": 3, "cells.standalone": 1})
    never = problems(path, scheduler__mode="async", scheduler__async_training_cells=4, cells__standalone=2)
    assert "standalone engines never train" in never["scheduler.async_training_cells"]
    load(path, {"scheduler.groups_per_batch": 13, "cells.standalone": 1})  # its places count
    assert "negative" in problems(path, cells__standalone=-1)["cells.standalone"]
    assert "negative" in problems(path, scheduler__phi=-0.5)["scheduler.phi"]
    assert "greater than 0" in problems(path, scheduler__mu=0)["scheduler.mu"]


def test_other_contradictions_are_refused(tmp_path: Path) -> None:
    one = {"name": "a", "tasks": "tasks", "executions": 4}
    path = write_run(tmp_path, evaluation={"sets": [one, {**one, "executions": 0, "temperature": -1}]})
    found = problems(path, name="a b", execution__overall_budget_s=10, training__sequence_clip_low=2)
    assert "twice" in found["evaluation.sets[1].name"]
    assert "greater than 0" in found["evaluation.sets[1].executions"]
    assert "negative" in found["evaluation.sets[1].temperature"]
    assert "letters" in found["name"]
    assert "larger" in found["execution.overall_budget_s"]
    assert "swap" in found["training.sequence_clip_low"]


def numbers_of(kind: type[msgspec.Struct], prefix: str = "") -> set[str]:
    """Dotted keys of all numbers of a section and its sub-sections."""
    found: set[str] = set()
    for field in msgspec.structs.fields(kind):
        if field.type in (int, float):
            found.add(prefix + field.encode_name)
        elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found |= numbers_of(field.type, f"{prefix}{field.encode_name}.")
    return found


def test_every_number_of_the_run_file_has_a_range(tmp_path: Path) -> None:
    free = {"seed"}
    by_rule = {
        "training.adam_beta1",
        "training.adam_beta2",
        "training.sequence_clip_low",
        "training.sequence_clip_high",
    }
    assert numbers_of(RunConfig) == {*POSITIVE, *NOT_NEGATIVE, *free, *by_rule}
    assert isinstance(load(write_run(tmp_path)), RunConfig)
