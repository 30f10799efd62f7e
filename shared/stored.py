"""One message of the stream, as every reader sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.codec import UndecodableEvent, decode
from shared.events import Event


@dataclass(frozen=True, slots=True)
class Stored:
    """`event` is None where the bytes are no known event (`undecodable` says why). `time`: when the stream stored it,
    in seconds since the epoch."""

    sequence: int
    time: float
    subject: str
    headers: dict[str, str]
    event: Event | None
    data: bytes
    undecodable: str = ""


def stored(sequence: int, time: float, subject: str, headers: Mapping[str, str] | None, data: bytes) -> Stored:
    """Decode one message of the stream."""
    try:
        return Stored(sequence, time, subject, dict(headers or {}), decode(data), data)
    except UndecodableEvent as error:
        return Stored(sequence, time, subject, dict(headers or {}), None, data, str(error))
