"""Where checkpoints lie and which of them stay.

Invariant: the newest committed checkpoint is never removed: a committed batch must survive the loss of the core.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_NAME = re.compile(r"step-(\d{5,})\Z")


def checkpoint_path(run_dir: Path, version: int) -> Path:
    return run_dir / "checkpoints" / f"step-{version:05d}"


def superseded(versions: list[int], newest: int, keep: int, every: int) -> list[int]:
    """Versions that need not stay: all but `newest` and the last `keep` multiples of `every`. Newer ones than
    `newest` are steps that were never committed."""
    kept = [v for v in sorted(versions) if v <= newest and v % max(every, 1) == 0][-max(keep, 1) :]
    return [v for v in sorted(versions) if v != newest and v not in kept]


def prune(run_dir: Path, *, newest: int, keep: int, every: int) -> None:
    folder = run_dir / "checkpoints"
    found = {int(m.group(1)): p for p in folder.iterdir() if (m := _NAME.match(p.name))} if folder.is_dir() else {}
    for version in superseded(list(found), newest, keep, every):
        shutil.rmtree(found[version], ignore_errors=True)
