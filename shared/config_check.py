"""Reading a run file, and everything that can be known to be wrong before a run starts.

Invariant: `load_checked` returns a RunConfig with absolute paths that passed all checks, or raises one ConfigError that
lists every problem found, each with its key, the value and what to do.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from shared.config import RunConfig
from shared.config_rules import problems_of


@dataclass(frozen=True)
class Problem:
    key: str  # dotted, "" for the file as a whole
    value: Any
    fix: str

    def __str__(self) -> str:
        shown = "" if self.value is msgspec.UNSET else f" = {_short(self.value)}"
        return f"{self.key or 'run file'}{shown}: {self.fix}"


class ConfigError(ValueError):
    """A run file that cannot be used; `problems` holds all that is wrong."""

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.path, self.problems = path, problems
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"{path} has {len(problems)} problem{'s' if len(problems) > 1 else ''}:\n{lines}")


def load_checked(path: Path, overrides: Mapping[str, Any]) -> RunConfig:
    """Read `path`, put `overrides` (dotted keys) over it, resolve paths against its folder, check the whole."""
    plain = _read(path)
    problems = list(_override(plain, overrides))
    problems += _shape_problems(plain, RunConfig, "")
    if problems:
        raise ConfigError(path, problems)
    config = _absolute(msgspec.convert(plain, RunConfig), path.resolve().parent)
    problems = [Problem(*problem) for problem in problems_of(config)]
    if problems:
        raise ConfigError(path, problems)
    return config


# ------------------------------------------------------------------------------------------------------ YAML, strictly


class DuplicateKey(yaml.YAMLError):  # type: ignore[misc]
    """The same key twice in one mapping; YAML would silently take the last."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """SafeLoader that refuses duplicate keys and reads 1e-6 as a number (YAML 1.1 wants 1.0e-6)."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise DuplicateKey(f"key {key!r} stands twice (line {key_node.start_mark.line + 1}): keep one of them")
        seen.add(key)
    mapping: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return mapping


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\Z")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def parse_value(text: str) -> Any:
    """One value as the run file would read it; raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


def _read(path: Path) -> dict[str, Any]:
    try:
        plain = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # a SafeLoader
    except OSError as error:
        problem = Problem("", msgspec.UNSET, f"cannot be read ({error.strerror}): check the path")
        raise ConfigError(path, [problem]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(path, [Problem("", msgspec.UNSET, f"is no YAML: {error}")]) from error
    if not isinstance(plain, dict):
        raise ConfigError(path, [Problem("", plain, "must be a mapping of keys such as name, model, tasks")])
    return plain


def _override(plain: dict[str, Any], overrides: Mapping[str, Any]) -> Iterator[Problem]:
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        place: Any = plain
        for parent in parents:
            if place.get(parent) is None:
                place[parent] = {}
            place = place[parent]
            if not isinstance(place, dict):
                yield Problem(dotted, value, f"{parent} is no section: only keys inside sections can be overridden")
                break
        else:
            place[last] = value


# ------------------------------------------------------------------------------------------------------- keys and types


def _shape_problems(value: Any, kind: type[msgspec.Struct], key: str) -> list[Problem]:
    """Unknown keys, missing keys and wrong types of one section and its sub-sections."""
    if not isinstance(value, dict):
        return [Problem(key, value, "must be a section (a mapping of keys)")]
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    problems = []
    for name in value:
        if name not in fields:
            problems.append(Problem(_join(key, str(name)), value[name], _unknown(str(name), list(fields))))
    for name, field in fields.items():
        if name in value:
            problems += _value_problems(value[name], field.type, _join(key, name))
        elif field.required:
            problems.append(Problem(_join(key, name), msgspec.UNSET, f"is missing: add `{name}:`"))
    return problems


def _value_problems(value: Any, kind: Any, key: str) -> list[Problem]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _shape_problems(value, kind, key)
    inner = get_args(kind)
    if get_origin(kind) is tuple and _is_struct(inner[0]) and isinstance(value, list):
        return [p for i, item in enumerate(value) for p in _shape_problems(item, inner[0], f"{key}[{i}]")]
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)[0].lower() + str(error)[1:]
        if get_origin(kind) is Literal:
            text += f": use one of {', '.join(map(str, get_args(kind)))}"
        return [Problem(key, value, f"has a wrong type or value: {text.replace(' - at `$', ' at `' + key)}")]
    return []


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"is unknown: did you mean `{near[0]}`?"
    return f"is unknown: remove it; known here: {', '.join(known)}"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


# --------------------------------------------------------------------------------------------------------------- paths


def _absolute(config: RunConfig, base: Path) -> RunConfig:
    """Folders that the run file names relative to itself, as absolute paths. runs_dir is relative to the working
    directory and left as it is."""

    def resolve(path: str) -> str:
        return str((base / Path(path).expanduser()).resolve()) if path else path

    replace = msgspec.structs.replace
    sets = tuple(replace(s, tasks=resolve(s.tasks)) for s in config.evaluation.sets)
    return replace(
        config,
        model=replace(config.model, path=resolve(config.model.path)),
        tasks=replace(config.tasks, train=resolve(config.tasks.train)),
        evaluation=replace(config.evaluation, sets=sets),
        harness=replace(config.harness, mounts=tuple(resolve(m) for m in config.harness.mounts)),
    )
