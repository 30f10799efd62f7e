"""The family of tasks: which small repositories can be asked for, and what is right about each.

A task is a pure function of (split, seed). Every function asked for is a (name, operation, optional suffix)
combination; a fixed part of the combinations is kept for the held-out split, and no training or evaluation task ever
shows one of them.

Kinds, each a quarter of the tasks:
- plain: one file with one or two functions.
- value: one file; a constant that its functions need stands in `config.txt`.
- pair:  two files, of which the second is to be handed to a sub-agent.
- notes: one file; the constant stands somewhere in the long `notes.txt`, so that reading it fills the context.
"""

import hashlib
import random
from dataclasses import dataclass

KINDS = ("plain", "value", "pair", "notes")
SPLITS = ("train", "eval", "heldout")
CONSTANTS = range(2, 10)
NOTES_LINES = 36

NAMES = [
    "add", "merge", "scale", "split", "count", "find", "get", "make", "pick", "join", "trim", "pack", "fold",
    "rank", "sort", "mix", "cut", "map", "shift", "group", "read", "show", "check", "build", "item", "word",
    "list", "pair", "row", "node", "text", "key", "tag", "name", "line", "part", "unit", "box", "cell", "edge",
    "page", "step", "token", "value", "score", "index", "label", "block",
]  # fmt: skip
MODULES = [
    "tools", "utils", "core", "math", "store", "query", "parse", "graph", "table", "engine", "report", "sales",
    "orders", "users", "geo", "audio", "shop", "cards",
]  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """What a function computes: ways to say it in words, and its Python expression."""

    phrases: tuple[str, ...]
    code: str


ARGUMENTS = {"numbers": "a, b", "string": "s", "items": "xs"}
OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "numbers": (
        Operation(("the sum of a and b", "a plus b"), "a + b"),
        Operation(("the difference of a and b", "a minus b"), "a - b"),
        Operation(("the product of a and b", "a times b"), "a * b"),
        Operation(("the larger of a and b", "the maximum of a and b"), "max(a, b)"),
        Operation(("the smaller of a and b", "the minimum of a and b"), "min(a, b)"),
    ),
    "string": (
        Operation(("s in upper case", "the upper case form of s"), "s.upper()"),
        Operation(("s in lower case", "the lower case form of s"), "s.lower()"),
        Operation(("s reversed", "s backwards"), "s[::-1]"),
        Operation(("the length of s", "how long s is"), "len(s)"),
    ),
    "items": (
        Operation(("the total of xs", "the sum of xs"), "sum(xs)"),
        Operation(("the largest item of xs", "the maximum of xs"), "max(xs)"),
        Operation(("the smallest item of xs", "the minimum of xs"), "min(xs)"),
        Operation(("xs sorted", "xs in order"), "sorted(xs)"),
    ),
}
SUFFIXES = (("plus", "+"), ("minus", "-"), ("times", "*"))
TIMES = 2


@dataclass(frozen=True)
class Function:
    """One function to write. `suffix` and `constant` go together; `looked_up` means the constant is called LIMIT."""

    name: str
    takes: str
    operation: int
    phrase: str
    suffix: int | None = None
    constant: int = 0
    looked_up: bool = False

    def expression(self, operation: int | None = None, suffix: int | None = None, constant: int | None = None) -> str:
        """The Python expression, or what it would be with another operation, suffix or constant."""
        code = OPERATIONS[self.takes][self.operation if operation is None else operation].code
        suffix = self.suffix if suffix is None else suffix
        if suffix is None:
            return code
        if suffix == TIMES and not code.endswith(")"):
            code = f"({code})"
        return f"{code} {SUFFIXES[suffix][1]} {self.constant if constant is None else constant}"

    def source(self, expression: str) -> str:
        """The function's source with `expression` as its result."""
        return f"def {self.name}({ARGUMENTS[self.takes]}):\n    return {expression}\n"

    def sentence(self) -> str:
        """What the instruction says about it."""
        tail = ""
        if self.suffix is not None:
            tail = f" {SUFFIXES[self.suffix][0]} {'LIMIT' if self.looked_up else self.constant}"
        return f"write {self.name}({ARGUMENTS[self.takes]}) that returns {self.phrase}{tail}"


@dataclass(frozen=True)
class File:
    """One file to write."""

    path: str
    functions: tuple[Function, ...]

    def sentence(self) -> str:
        return f"{self.path}: " + " and ".join(f.sentence() for f in self.functions) + "."

    def source(self) -> str:
        return "".join(f.source(f.expression()) for f in self.functions)


@dataclass(frozen=True)
class Check:
    """One hidden test: module, function, arguments, expected result (all JSON values)."""

    module: str
    function: str
    arguments: tuple
    expected: object


@dataclass(frozen=True)
class Task:
    """A whole task. `limit` is the constant to look up, if any; `workspace` maps paths to the starting files."""

    split: str
    seed: int
    kind: str
    files: tuple[File, ...]
    instruction: str
    workspace: dict[str, str]
    limit: int | None
    checks: tuple[Check, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.seed:05d}"


def combination(function: Function) -> tuple[str, str, int, int | None]:
    """What must not be shared between training and held-out tasks."""
    return function.name, function.takes, function.operation, function.suffix


def is_held_out(function: Function) -> bool:
    """Whether this combination is kept from training: a fifth of (operation, suffix), a sixth of (name, operation)."""
    if function.suffix is not None and (function.operation * 2 + function.suffix) % 5 == 0:
        return True
    digest = hashlib.sha256(f"{function.name} {function.takes} {function.operation}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 6 == 0


def make_task(split: str, seed: int, kind: str | None = None) -> Task:
    """The task of this split and seed; kinds take turns by seed unless one is given."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; one of {', '.join(SPLITS)}")
    kind = kind or KINDS[seed % len(KINDS)]
    rng = random.Random(f"{split} {seed} {kind}")
    limit = rng.choice(CONSTANTS) if kind in ("value", "notes") else None
    paths = [f"{module}.py" for module in rng.sample(MODULES, 2 if kind == "pair" else 1)]
    count = rng.choice((1, 1, 2)) if kind in ("plain", "value") else 1
    used: set[str] = set()
    files = tuple(
        File(path, tuple(_function(rng, split, used, limit if i == 0 else None) for i in range(count)))
        for path in paths
    )
    source = {"value": "config.txt", "notes": "notes.txt"}.get(kind)
    parts = [file.sentence() for file in files]
    workspace = {}
    if kind == "pair":
        parts.append(f"Delegate {files[1].path}.")
    if source:
        parts.append(f"LIMIT is in {source}.")
        workspace[source] = _settings_text(rng, limit, 1 if kind == "value" else NOTES_LINES)
    checks = tuple(check for file in files for f in file.functions for check in _checks(rng, file, f))
    return Task(split, seed, kind, files, " ".join(parts), workspace, limit, checks)


def _function(rng: random.Random, split: str, used: set[str], limit: int | None) -> Function:
    """A fresh function of the split's own combinations; with a `limit` it is one that needs it."""
    while True:
        takes = "numbers" if limit is not None else rng.choice(("numbers", "numbers", "string", "items"))
        index = rng.randrange(len(OPERATIONS[takes]))
        suffix, constant = None, 0
        if takes == "numbers" and (limit is not None or rng.random() < 0.3):
            suffix, constant = rng.randrange(len(SUFFIXES)), limit or rng.choice(CONSTANTS)
        phrase = rng.choice(OPERATIONS[takes][index].phrases)
        function = Function(rng.choice(NAMES), takes, index, phrase, suffix, constant, limit is not None)
        if function.name not in used and is_held_out(function) == (split == "heldout"):
            used.add(function.name)
            return function


def _settings_text(rng: random.Random, limit: int, lines: int) -> str:
    """`lines` settings, one of which is LIMIT."""
    rows = [f"{rng.choice(NAMES)} = {rng.choice(CONSTANTS)}" for _ in range(lines - 1)]
    rows.insert(rng.randrange(lines), f"LIMIT = {limit}")
    return "\n".join(rows) + "\n"


def _checks(rng: random.Random, file: File, function: Function) -> list[Check]:
    """Three hidden tests of one function, on arguments that tell the operations apart."""
    draw = {
        "numbers": lambda: (rng.randint(11, 40), rng.randint(2, 10)),
        "string": lambda: ("".join(rng.choice("abcXYZ") for _ in range(rng.randint(4, 7))),),
        "items": lambda: ([rng.randint(1, 60) for _ in range(rng.randint(4, 7))],),
    }[function.takes]
    checks = []
    for _ in range(3):
        arguments = draw()
        names = dict(zip(ARGUMENTS[function.takes].split(", "), arguments, strict=True))
        expected = eval(function.expression(), {}, names)  # our own expression, never a policy's
        checks.append(Check(file.path.removesuffix(".py"), function.name, arguments, expected))
    return checks
