"""Calls that are in flight at some proxy, as the stream tells it: who owns each, and what it has generated so far.

Invariant: a pure function of the events. A flight lasts from ModelCallBegun to its record, or its end without one. It
has one owner, the first in the stream that began its latest take, and only that owner's progress counts. What progress
tells is the beginning of the output, without gaps.
"""

from __future__ import annotations

import msgspec

from services.proxy import canonical
from shared.events import (
    Event,
    ExecutionAssessed,
    ModelCallBegun,
    ModelCallDropped,
    ModelCallLeft,
    ModelCallProgressed,
    ModelCallRecorded,
    VersionSpan,
)


class Flight(msgspec.Struct):
    """`ids` int32 and `logprobs` float32 of the output that is durable; `left`: nobody waits for the reply."""

    begun: ModelCallBegun
    ids: bytes = b""
    logprobs: bytes = b""
    versions: tuple[VersionSpan, ...] = ()
    left: bool = False

    @property
    def tokens(self) -> int:
        return len(self.ids) // 4


class Flights(msgspec.Struct):
    calls: dict[str, dict[str, Flight]] = {}  # execution -> call -> flight
    numbers: dict[str, dict[int, int]] = {}  # execution -> attempt -> highest number of a call that ever began

    def handle(self, event: Event) -> None:
        match event:
            case ModelCallBegun():
                self._begun(event)
            case ModelCallProgressed():
                self._progressed(event)
            case ModelCallLeft():
                flight = self.find(event.execution, event.call)
                if flight is not None:
                    flight.left = True
            case ModelCallRecorded() | ModelCallDropped():
                self._ended(event.execution, event.call)
            case ExecutionAssessed():
                self.calls.pop(event.execution, None)
                self.numbers.pop(event.execution, None)

    def _begun(self, event: ModelCallBegun) -> None:
        known = self.find(event.execution, event.call)
        if event.take == 0 and known is None:
            self.calls.setdefault(event.execution, {})[event.call] = Flight(event)
            numbers = self.numbers.setdefault(event.execution, {})
            numbers[event.attempt] = max(numbers.get(event.attempt, 0), canonical.call_number(event.call))
        elif known is not None and event.take == known.begun.take + 1:
            known.begun, known.left = event, False

    def _progressed(self, event: ModelCallProgressed) -> None:
        flight = self.find(event.execution, event.call)
        if flight is None or flight.begun.take != event.take or event.start > flight.tokens:
            return
        flight.ids = flight.ids[: 4 * event.start] + event.output_ids
        flight.logprobs = flight.logprobs[: 4 * event.start] + event.output_logprobs
        flight.versions = event.versions

    def _ended(self, execution: str, call: str) -> None:
        flights = self.calls.get(execution)
        if flights is not None:
            flights.pop(call, None)
            if not flights:
                del self.calls[execution]

    def find(self, execution: str, call: str) -> Flight | None:
        return self.calls.get(execution, {}).get(call)

    def latest_number(self, execution: str, attempt: int) -> int:
        return self.numbers.get(execution, {}).get(attempt, 0)

    def of(self, execution: str, attempt: int) -> list[Flight]:
        """Flights of attempts up to `attempt`, in the order in which they began."""
        return [f for f in self.calls.get(execution, {}).values() if f.begun.attempt <= attempt]

    def of_request(self, execution: str, attempt: int, request: str) -> list[Flight]:
        return [f for f in self.of(execution, attempt) if f.begun.attempt == attempt and f.begun.request == request]
