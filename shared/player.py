"""A core played over stored events: the same steps live, in replay and in the offline replay driver.

Owns what belongs to an actor beside its core: position, time, timers, and which events it skips. Invariants: the same
messages give the same effects, byte for byte; `now` never goes back; an event whose handling failed changes nothing
(`Player.rewind` takes core and timers back to the base state, the caller plays the messages since the base again, and
the failed one is skipped from then on).

Each effect is named by its cause: "<sequence of the event>.<index in the effect list>". The copy of a published
effect in the stream carries the headers ``Gyre-Actor`` and ``Gyre-Cause``; by them a restart knows what is done.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shared import ids
from shared.actor import Core, Do, Effect, Publish, Wake
from shared.codec import UndecodableEvent, decode, encode, event_name
from shared.events import Event, TimerFired
from shared.nats_server import MAX_EVENT_BYTES
from shared.stored import Stored

ACTOR, CAUSE = "Gyre-Actor", "Gyre-Cause"
DEAD = "dead"  # cause of a dead letter: "<sequence>.dead"


class HandlerFailed(Exception):
    """The core raised on an event, or answered with something that cannot be carried out."""

    def __init__(self, sequence: int, reason: str) -> None:
        super().__init__(f"event {sequence}: {reason}")
        self.sequence, self.reason = sequence, reason


class UnusableEffect(TypeError):
    """An effect that is no effect, or an event that the bus would refuse or nobody could decode."""


class Timer(msgspec.Struct, frozen=True):
    at: float
    cause: str


@dataclass(frozen=True, slots=True)
class Caused:
    """One effect with its cause. For a Publish: the subject's last parts and the encoded event."""

    cause: str
    effect: Effect
    data: bytes = b""
    traceparent: str = ""


class _State(msgspec.Struct, frozen=True):
    """What a snapshot holds."""

    actor: str
    core_type: str
    sequence: int
    now: float
    timers: dict[str, Timer]
    core: bytes


class Player:
    """Plays stored messages into `core`. `skip`: sequences that were dead-lettered before by this actor."""

    def __init__(self, core: Core, actor: str, skip: Iterable[int] = ()) -> None:
        self.core, self.actor = core, actor
        self.skip = set(skip)
        self.sequence, self.now = 0, 0.0
        self.timers: dict[str, Timer] = {}
        self._base = self._capture()

    def apply(self, message: Stored) -> list[Caused]:
        """Play the next message; returns its effects. After HandlerFailed call `rewind` before anything else."""
        self.sequence, self.now = message.sequence, max(self.now, message.time)
        if message.event is None or message.sequence in self.skip:
            return []
        if isinstance(message.event, TimerFired) and not self._accept_timer(message, message.event):
            return []
        trace = message.headers.get("traceparent", "")
        try:
            effects = self.core.handle(message.event, self.now)
            caused = [prepare(f"{message.sequence}.{i}", effect, trace) for i, effect in enumerate(effects)]
        except Exception as error:
            raise HandlerFailed(message.sequence, f"{type(error).__name__}: {error}") from error
        for one in caused:
            if isinstance(one.effect, Wake):
                self.timers[one.effect.key] = Timer(one.effect.at, one.cause)
        return caused

    def _accept_timer(self, message: Stored, fired: TimerFired) -> bool:
        """Only this actor's own timer counts, and only the latest Wake of its key."""
        if message.headers.get(ACTOR) != self.actor:
            return False
        timer = self.timers.get(fired.key)
        if timer is None or timer.cause != message.headers.get(CAUSE):
            return False
        del self.timers[fired.key]
        self.now = max(self.now, timer.at)  # clocks of shell and server may differ: never before `at`
        return True

    # ------------------------------------------------------------------------------------------- failed events

    def rewind(self, failed: int) -> int:
        """Back to the base state, with `failed` skipped from now on; returns the base's sequence."""
        self.skip.add(failed)
        self.sequence, self.now, timers, state = copy.deepcopy(self._base)
        self.timers = timers
        _adopt(self.core, state)
        return self.sequence

    def _capture(self) -> tuple[int, float, dict[str, Timer], Any]:
        return copy.deepcopy((self.sequence, self.now, self.timers, self.core.__getstate__()))

    # ----------------------------------------------------------------------------------------------- snapshots

    def snapshot(self) -> bytes:
        core_type = f"{type(self.core).__module__}.{type(self.core).__qualname__}"
        return msgspec.msgpack.encode(
            _State(self.actor, core_type, self.sequence, self.now, self.timers, self.core.snapshot())
        )

    def restore(self, data: bytes) -> None:
        """Take a snapshot back; ValueError if it is not one of this actor and core."""
        state = msgspec.msgpack.decode(data, type=_State)
        core_type = f"{type(self.core).__module__}.{type(self.core).__qualname__}"
        if (state.actor, state.core_type) != (self.actor, core_type):
            raise ValueError(f"a snapshot of {state.actor} ({state.core_type}), not of {self.actor} ({core_type})")
        restored = self.core.restore(state.core)  # type: ignore[attr-defined]
        if restored is not None and restored is not self.core:  # restore may be a class method, too
            _adopt(self.core, restored.__getstate__())
        self.sequence, self.now, self.timers = state.sequence, state.now, dict(state.timers)
        self._base = self._capture()


def _adopt(core: object, state: Any) -> None:
    """Give `core` the state that `object.__getstate__` returned: its __dict__, or (__dict__, slots)."""
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if hasattr(core, "__dict__"):
        core.__dict__.clear()
        core.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        object.__setattr__(core, name, value)


def prepare(cause: str, effect: object, traceparent: str = "") -> Caused:
    """Name an effect; raises UnusableEffect for what could never be carried out."""
    if isinstance(effect, Publish):
        return Caused(cause, effect, _checked_bytes(effect.event), traceparent)
    if isinstance(effect, Wake | Do):
        return Caused(cause, effect)
    raise UnusableEffect(f"{effect!r} is no Publish, Wake or Do")


def _checked_bytes(event: Event) -> bytes:
    data = encode(event)
    ids.check(event.entity())
    if len(data) > MAX_EVENT_BYTES:
        raise UnusableEffect(f"{event_name(event)} of {len(data)} bytes: put the payload into the blob store")
    try:
        decode(data)
    except UndecodableEvent as error:
        raise UnusableEffect(f"{event_name(event)} has a field of a wrong type: {error}") from error
    return data


# ------------------------------------------------------------------------------------------------- offline replay


def replay(messages: Sequence[Stored], core: Core, actor: str) -> list[Caused]:
    """All effects of `core` (fresh) over a recorded stream, in order."""
    player = Player(core, actor, skip=dead_lettered(messages, actor))
    effects: list[Caused] = []
    for position, message in enumerate(messages):
        try:
            effects += player.apply(message)
        except HandlerFailed as failure:
            player.rewind(failure.sequence)
            for earlier in messages[: position + 1]:
                player.apply(earlier)
    return effects


def dead_lettered(messages: Iterable[Stored], actor: str) -> set[int]:
    """Sequences that `actor` could not handle in the recorded run, from its dead letters."""
    found = set()
    for message in messages:
        cause = message.headers.get(CAUSE, "")
        if message.headers.get(ACTOR) == actor and cause.endswith(f".{DEAD}"):
            found.add(int(cause.split(".")[0]))
    return found


def differences(messages: Sequence[Stored], effects: Iterable[Caused], actor: str) -> list[str]:
    """Where the effects of a replay are not what `actor` published in the recorded run; empty = byte-identical.

    Effects of the last events may be missing in the record (the run ended between event and effect): no difference."""
    recorded = {
        message.headers[CAUSE]: message
        for message in messages
        if message.headers.get(ACTOR) == actor and not isinstance(message.event, TimerFired)
    }
    found = []
    for caused in effects:
        if isinstance(caused.effect, Publish):
            was = recorded.pop(caused.cause, None)
            if was is not None and was.data != caused.data:
                found.append(f"{caused.cause}: replay gives {caused.effect.event}, recorded is {was.event}")
    found += [
        f"{cause}: recorded {message.event} at {message.sequence}, replay gives nothing"
        for cause, message in recorded.items()
        if not cause.endswith(f".{DEAD}")
    ]
    return found
