"""`gyre events`: the stream of a run, one readable line an event."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import msgspec

from cli.usage import UsageError
from shared.bus import Stored
from shared.codec import event_name


def shorten(value: Any, limit: int = 60) -> Any:
    """Bytes become their length, long strings and lists are cut: a line stays a line."""
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, str) and len(value) > limit:
        return value[: limit - 1] + "…"
    if isinstance(value, dict):
        items = list(value.items())
        short = {k: shorten(v, limit) for k, v in items[:12]}
        return short | ({"…": len(items) - 12} if len(items) > 12 else {})
    if isinstance(value, list | tuple):
        return [shorten(v, limit) for v in value[:6]] + ([f"… {len(value) - 6} more"] if len(value) > 6 else [])
    return value


def fields(stored: Stored, *, whole: bool = False) -> dict[str, Any]:
    if stored.event is None:
        return {"undecodable": len(stored.data)}
    plain = {f: getattr(stored.event, f) for f in stored.event.__struct_fields__}
    plain = {k: msgspec.to_builtins(v, builtin_types=(bytes,)) for k, v in plain.items()}
    return plain if whole else {k: shorten(v) for k, v in plain.items()}


def line(stored: Stored) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(stored.time)) + f".{int(stored.time % 1 * 1000):03d}"
    parts = stored.subject.split(".")
    name = event_name(stored.event) if stored.event is not None else "UNDECODABLE"
    body = " ".join(f"{k}={json.dumps(v, ensure_ascii=False, default=str)}" for k, v in fields(stored).items())
    return f"{stored.sequence:>7} {at} {parts[2]:<10} {name:<22} {body}"


def json_line(stored: Stored) -> str:
    name = event_name(stored.event) if stored.event is not None else None
    body = {k: v.hex() if isinstance(v, bytes) else v for k, v in fields(stored, whole=True).items()}
    return json.dumps(
        {"sequence": stored.sequence, "time": stored.time, "subject": stored.subject, "event": name} | body,
        default=repr,
    )


def matcher(pattern: str | None) -> re.Pattern[str]:
    """Compile a --grep pattern; a bad one is refused with the reason."""
    try:
        return re.compile(pattern or "")
    except re.error as error:
        raise UsageError(f"--grep {pattern!r} is no regular expression: {error}") from error
