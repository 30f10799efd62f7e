"""docs/run-file.md, made from the classes in shared/config.py (`gyre run-file`).

Invariant: every key of the run file appears with type, default and meaning; a test keeps the page equal to this.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any, get_type_hints

import msgspec

from shared import config

HEAD = """# Run file

One YAML file describes a run: `gyre up FILE`. Relative paths in it start at the file's own folder. Unknown keys, wrong
types and combinations that cannot work are refused before anything starts. Any key can be set on the command line:
`gyre up FILE --set training.steps=4`. Made by `gyre run-file`; do not edit by hand.
"""


def _attribute_texts(cls: type) -> dict[str, str]:
    """The string that follows each attribute in the class body."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        match node, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


def _type_text(hint: Any) -> str:
    if getattr(hint, "__origin__", None) is not None:
        name = getattr(hint.__origin__, "__name__", str(hint.__origin__))
        if name == "Literal":
            return ", ".join(str(a) for a in hint.__args__)
        if name == "tuple":
            return f"list of {_type_text(hint.__args__[0])}"
        if name == "dict":
            return "mapping"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint.__name__.removesuffix("Config")
    name = str(hint.__name__)
    return {"str": "text", "int": "integer", "float": "number", "bool": "true/false"}.get(name, name)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "**required**"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        return "see below"
    return f"`{list(value) if isinstance(value, tuple) else value!r}`".replace("'", '"')


def _section(cls: type[msgspec.Struct], path: str) -> list[str]:
    doc = inspect.getdoc(cls) or ""
    own = cls.__doc__ is not None and not doc.startswith(cls.__name__ + "(")
    lines = [
        f"## {path or 'top level'}",
        "",
        doc if own else "",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    texts, hints = _attribute_texts(cls), get_type_hints(cls)
    for field in msgspec.structs.fields(cls):
        kind = _type_text(hints[field.name])
        lines.append(f"| `{field.name}` | {kind} | {_default(field)} | {texts.get(field.name, '')} |")
    return [*lines, ""]


def reference() -> str:
    """The whole page."""
    lines = [HEAD, *_section(config.RunConfig, "")]
    hints = get_type_hints(config.RunConfig)
    for field in msgspec.structs.fields(config.RunConfig):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            lines += _section(hint, field.name)
            if hint is config.EvaluationConfig:
                lines += _section(config.EvalSetConfig, "evaluation.sets[]")
    return "\n".join(lines).rstrip() + "\n"
