"""Writes the family's tasks as folders in the Harbor layout.

`python -m examples.minirepo.generate --out DIR [--seed 0] [--train 384] [--eval 128] [--heldout 128]`

    DIR/<split>/<task>/task.toml            what the task is, its time limits
                      /instruction.md       what the agent is told
                      /environment/         Dockerfile, and workspace/ with the starting files (WORKDIR /app)
                      /tests/test.sh        run in /app once the agent is done; leaves a fraction, 0 to 1, in
                                            /logs/verifier/reward.txt
                      /tests/check.py       the hidden tests themselves

Invariants: the same arguments write the same bytes; nothing of tests/ or of the solution is in environment/; a folder
of the same name is replaced, other folders are left alone.
"""

import argparse
import shutil
import sys
from pathlib import Path

from examples.minirepo.family import SPLITS, Task, make_task

SEEDS_PER_SPLIT = 100_000  # the tasks of one --seed; far below the seeds that the warm start uses
DOCKERFILE = "FROM python:3.11-slim\nWORKDIR /app\nCOPY workspace/ /app/\n"
TEST_SH = """\
#!/bin/sh
# Runs in the workspace. A 0 is written first: a submission that ends the checker early has not passed anything.
tests=$(dirname "$0")
logs=${VERIFIER_LOGS:-/logs/verifier}
mkdir -p "$logs"
echo 0 > "$logs/reward.txt"
exec python3 -I -S "$tests/check.py" "$logs/reward.txt" > /dev/null 2>&1
"""
CHECK_PY = """\
# Hidden tests: (module, function, arguments, expected result). Writes the fraction that passes to the file argv[1].
# The submission runs in a child without the expected results; it only sends back what its functions returned. What it
# prints, writes to the reward file, or leaves running does not count: the parent writes the reward when it is gone.
import posix
import select
import sys
import time

LIMIT_S = 5.0
CALLS = {calls}
EXPECTED = {expected}


def results():
    modules, out = {{}}, []
    for module, function, arguments in CALLS:
        try:
            if module not in modules:
                modules[module] = {{}}
                with open(module + ".py") as file:
                    exec(compile(file.read(), module, "exec"), modules[module])
            out.append(repr(modules[module][function](*arguments)))
        except BaseException:
            out.append("")
    return out


reading, writing = posix.pipe()
child = posix.fork()
if child == 0:
    EXPECTED.clear()
    posix.close(reading)
    posix.setpgid(0, 0)
    sent = "\\0".join(text.replace("\\0", "") for text in results()).encode()
    while sent:
        sent = sent[posix.write(writing, sent) :]
    posix._exit(0)
posix.close(writing)
data, deadline = b"", time.monotonic() + LIMIT_S
while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
    chunk = posix.read(reading, 65536)
    if not chunk:
        break
    data += chunk
try:
    posix.killpg(child, 9)
except OSError:
    pass
posix.waitpid(child, 0)
got = data.decode("utf-8", "replace").split("\\0")
passed = sum(g == repr(e) for g, e in zip(got, EXPECTED)) if len(got) == len(EXPECTED) else 0
with open(sys.argv[1], "w") as file:
    file.write("%.6f\\n" % (passed / len(EXPECTED)))
"""
TASK_TOML = """\
version = "1.0"

[metadata]
kind = "{kind}"
seed = {seed}
split = "{split}"

[verifier]
timeout_sec = 20.0

[agent]
timeout_sec = 120.0
"""


def _listing(items: list[object]) -> str:
    return "[\n" + "".join(f"    {item!r},\n" for item in items) + "]"


def task_files(task: Task) -> dict[str, str]:
    """The task folder's files, by path."""
    calls = _listing([(c.module, c.function, list(c.arguments)) for c in task.checks])
    expected = _listing([c.expected for c in task.checks])
    files = {
        "task.toml": TASK_TOML.format(kind=task.kind, seed=task.seed, split=task.split),
        "instruction.md": task.instruction + "\n",
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": TEST_SH,
        "tests/check.py": CHECK_PY.format(calls=calls, expected=expected),
    }
    return files | {f"environment/workspace/{path}": text for path, text in task.workspace.items()}


def write_task(task: Task, folder: Path) -> None:
    """Writes one task folder, replacing an older one."""
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "environment" / "workspace").mkdir(parents=True)
    for path, text in task_files(task).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (folder / "tests" / "test.sh").chmod(0o755)


def generate(out: Path, seed: int, counts: dict[str, int]) -> dict[str, int]:
    """Writes `counts[split]` tasks per split and returns how many were written."""
    for split, count in counts.items():
        for i in range(count):
            task = make_task(split, seed * SEEDS_PER_SPLIT + i)
            write_task(task, out / split / task.name)
    return counts


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="generate", description="Writes the minirepo tasks as Harbor task folders.")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    for split, count in zip(SPLITS, (384, 128, 128), strict=True):
        parser.add_argument(f"--{split}", type=int, default=count, help=f"number of {split} tasks")
    args = parser.parse_args(argv)
    counts = {split: getattr(args, split) for split in SPLITS}
    if any(not 0 <= count <= SEEDS_PER_SPLIT for count in counts.values()) or not 0 <= args.seed < 10:
        parser.error(f"--seed takes 0 to 9 and the counts 0 to {SEEDS_PER_SPLIT}")
    generate(args.out, args.seed, counts)
    print(", ".join(f"{count} {split}" for split, count in counts.items()) + f" tasks in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
