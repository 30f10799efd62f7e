"""The end of a log file, for messages about a process that failed."""

from __future__ import annotations

from pathlib import Path

TAIL_BYTES = 4000


def log_tail(path: Path, limit: int = TAIL_BYTES) -> str:
    """The last `limit` bytes as text; "" if there is no such file."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit))
        return file.read().decode("utf-8", "replace").strip()
