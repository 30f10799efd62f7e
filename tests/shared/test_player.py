"""The player without I/O: determinism, snapshots, timers and failed events, as properties over made-up streams."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.actor import Effect, Publish, Wake
from shared.codec import encode
from shared.events import BurstEnded, Event, ServiceDied, StopRequested, TimerFired
from shared.player import ACTOR, CAUSE, Caused, HandlerFailed, Player, replay
from shared.stored import Stored
from tests.shared.support import CountingCore, input_event


class Remembering(CountingCore):
    """Also remembers the order in which it was woken, and keeps one timer key that every input sets anew."""

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        effects = list(super().handle(event, now)) if not isinstance(event, TimerFired) else []
        if isinstance(event, ServiceDied):
            return [*effects, Wake(now + event.exit_code, "k")]
        if isinstance(event, TimerFired):
            self.counts.fired += 1
            return [Publish(BurstEnded(burst=self.counts.fired, version=self.counts.inputs))]
        return effects


class Fragile(Remembering):
    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        effects = super().handle(event, now)
        if isinstance(event, ServiceDied) and event.exit_code % 3 == 0:
            raise ValueError("threes")
        return effects


def stream(script: list[int], actor: str = "me") -> list[Stored]:
    """A stored stream: n > 0 is input n; 0 is the firing of timer "k" for the input before; -n one for the n-th input
    back, which is stale unless that was the last."""
    messages: list[Stored] = []
    inputs: list[int] = []
    for position, code in enumerate(script):
        sequence, headers = position + 1, {}
        event: Event
        if code > 0:
            event = input_event(code)
            inputs.append(sequence)
        elif inputs:
            event = TimerFired(service="scheduler", key="k")
            cause = inputs[max(len(inputs) - 1 + code, 0)]
            wakes_at = 3 if sum(1 for i in inputs if i <= cause) % 3 == 0 else 2
            headers = {ACTOR: actor, CAUSE: f"{cause}.{wakes_at}"}
        else:
            event = StopRequested(reason="nothing")
        messages.append(Stored(sequence, 100.0 + position, "s", headers, event, encode(event)))
    return messages


def plain(effects: list[Caused]) -> list[tuple[str, object, bytes]]:
    return [(c.cause, c.effect, c.data) for c in effects]


scripts = st.lists(st.integers(-2, 7), max_size=30)


@given(scripts)
def test_the_same_stream_gives_the_same_effects(script: list[int]) -> None:
    messages = stream(script)
    assert plain(replay(messages, Remembering(), "me")) == plain(replay(messages, Remembering(), "me"))


@given(scripts, st.data())
def test_from_a_snapshot_on_the_effects_are_those_of_the_whole(script: list[int], data: st.DataObject) -> None:
    messages = stream(script)
    cut = data.draw(st.integers(0, len(messages)))
    player = Player(Remembering(), "me")
    before = [effect for m in messages[:cut] for effect in player.apply(m)]
    later = Player(Remembering(), "me")
    later.restore(player.snapshot())
    after = [effect for m in messages[cut:] for effect in later.apply(m)]
    assert plain(before + after) == plain(replay(messages, Remembering(), "me"))


@given(scripts)
def test_failed_events_leave_no_trace(script: list[int]) -> None:
    messages = stream(script)
    without = Player(
        Remembering(), "me", skip=[m.sequence for m, code in zip(messages, script, strict=True) if code in (3, 6)]
    )
    expected = [effect for m in messages for effect in without.apply(m)]
    core = Fragile()
    assert plain(replay(messages, core, "me")) == plain(expected)
    assert core.counts == without.core.counts  # type: ignore[attr-defined]


@given(scripts)
def test_only_the_latest_wake_of_a_key_wakes_and_never_early(script: list[int]) -> None:
    woken: list[float] = []

    class Watching(Remembering):
        def __init__(self) -> None:
            super().__init__()
            self.due: float | None = None

        def handle(self, event: Event, now: float) -> Sequence[Effect]:
            if isinstance(event, ServiceDied):
                self.due = now + event.exit_code
            if isinstance(event, TimerFired):
                assert self.due is not None  # set, and not answered yet
                assert now >= self.due
                self.due = None
                woken.append(now)
            return super().handle(event, now)

    replay(stream(script), Watching(), "me")
    assert woken == sorted(woken)


def test_a_firing_that_belongs_to_a_replaced_wake_wakes_nobody() -> None:
    player = Player(Remembering(), "me")
    first, second, stale, firing = stream([5, 7, -1, 0])
    player.apply(first)
    player.apply(second)
    assert player.apply(stale) == []
    assert player.timers["k"].cause == "2.2"  # still waiting
    assert player.now == stale.time
    assert len(player.apply(firing)) == 1
    assert player.timers == {}


def test_a_timer_of_another_actor_wakes_nobody() -> None:
    player = Player(Remembering(), "me")
    for message in stream([1, 0], actor="somebody"):
        effects = player.apply(message)
    assert effects == []
    assert "k" in player.timers


def test_now_never_goes_back() -> None:
    player = Player(CountingCore(), "me")
    first, second = stream([1, 2])
    player.apply(first)
    player.apply(Stored(2, 50.0, "s", {}, second.event, second.data))
    assert player.now == 100.0


def test_a_core_in_slots_is_taken_back_too() -> None:
    class Slotted:
        __slots__ = ("seen",)

        def __init__(self) -> None:
            self.seen: list[int] = []

        def handle(self, event: Event, now: float) -> Sequence[Effect]:
            assert isinstance(event, ServiceDied)
            self.seen.append(event.exit_code)
            if event.exit_code == 2:
                raise RuntimeError
            return []

        def snapshot(self) -> bytes:
            return b""

    core = Slotted()
    replay(stream([1, 2, 4]), core, "me")
    assert core.seen == [1, 4]


def test_a_snapshot_of_another_actor_or_core_is_refused() -> None:
    data = Player(CountingCore(), "me").snapshot()
    with pytest.raises(ValueError, match="a snapshot of me"):
        Player(CountingCore(), "you").restore(data)
    with pytest.raises(ValueError, match="a snapshot of me"):
        Player(Remembering(), "me").restore(data)


def test_a_core_whose_restore_is_a_class_method_is_restored_in_place() -> None:
    class Classy(CountingCore):
        @classmethod
        def restore(cls, data: bytes) -> Classy:  # type: ignore[override]
            core = cls()
            CountingCore.restore(core, data)
            return core

    player = Player(Classy(), "me")
    for message in stream([1, 2]):
        player.apply(message)
    core = Classy()
    Player(core, "me").restore(player.snapshot())
    assert core.counts.inputs == 2


def test_what_a_core_raises_is_named_with_its_sequence() -> None:
    player = Player(Fragile(), "me")
    with pytest.raises(HandlerFailed, match="event 1: ValueError: threes"):
        player.apply(stream([3])[0])
