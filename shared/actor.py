"""What a service's core is: plain state and one function, `handle(event, now) -> effects`.

Invariant: a core is a deterministic function of the events it was given, in stream order. It never awaits, reads a
clock, draws unseeded randomness or touches the outside; it says what should happen, a shell (runtime.py) does it.
`now` is the time at which the stream stored the event, so a replay sees the same value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shared.events import Event


@dataclass(frozen=True)
class Publish:
    """Publish `event` on the run's stream, exactly once per (causing event, position in the effect list)."""

    event: Event


@dataclass(frozen=True)
class Wake:
    """Feed TimerFired(service, key) back through the stream, not before time `at`. Same key: the later replaces."""

    at: float
    key: str


@dataclass(frozen=True)
class Do:
    """Ask the shell for something outside the stream. Never carried out while history is replayed: after a restart
    the outside is gone, and the shell tells the core so through an event (e.g. CellStarted)."""

    command: object


Effect: TypeAlias = Publish | Wake | Do


class Core(Protocol):
    """The pure part of a service."""

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        """Apply one event of the stream; return what follows from it."""
        ...

    def snapshot(self) -> bytes:
        """The whole state as bytes; `restore` of the same class takes it back."""
        ...
