"""What is decided about a call before it is generated: its number, its class, its limits.

Invariant: a call id is given out once, by any number of proxies: each proxy counts past all calls it knows, and marks
its numbers with its own name when it is not the only one. A class depends on the request and on what is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.proxy.context import Match, opening_mark, opening_of, opens_alike
from services.proxy.core import Execution
from services.proxy.dialects.base import Request
from services.proxy.profiles import Profile, Surroundings, classify, fingerprint, for_harness
from services.proxy.prompts import Prompt
from shared.events import ModelCallBegun, ModelCallUnclassified, Sampling
from shared.ids import call_id

log = logging.getLogger("gyre.proxy.plans")

Attempt = tuple[str, int]
OPENINGS_REMEMBERED = 10_000
FINGERPRINTS_REPORTED = 50  # per harness and process


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a call that is known before it is generated."""

    call: str
    execution: str
    attempt: int
    parent: str
    keep: int
    call_class: str
    input_ids: npt.NDArray[np.int32]
    sampling: Sampling
    request: str
    opening: str
    diverged: bool
    dialect: str


def plan_of(begun: ModelCallBegun, input_ids: npt.NDArray[np.int32]) -> Plan:
    """The plan of a call that another process began."""
    return Plan(
        call=begun.call,
        execution=begun.execution,
        attempt=begun.attempt,
        parent=begun.parent,
        keep=begun.keep,
        call_class=begun.call_class,
        input_ids=input_ids,
        sampling=begun.sampling,
        request=begun.request,
        opening=begun.opening,
        diverged=begun.diverged,
        dialect=begun.dialect,
    )


class Plans:
    """`proxy`: the name of this process among several, letters and digits; "" for the only one. `unclassified` is told
    of each kind of call that no rule knows."""

    def __init__(self, proxy: str, unclassified: Callable[[ModelCallUnclassified], None]) -> None:
        self._suffix = f"p{proxy}" if proxy else ""
        self._unclassified = unclassified
        self._numbers: dict[Attempt, int] = {}  # last call number given out
        self._openings: dict[Attempt, str] = {}
        self._alike: dict[tuple[int, str], bool] = {}
        self._profiles: dict[str, Profile] = {}
        self._reported: dict[str, set[str]] = {}

    def profile(self, harness: str) -> Profile:
        if harness not in self._profiles:
            self._profiles[harness] = for_harness(harness)
        return self._profiles[harness]

    def forget(self, execution: str, attempt: int) -> None:
        """Drop what is kept about attempts up to `attempt`."""
        tables: tuple[dict[Attempt, int] | dict[Attempt, str], ...] = (self._numbers, self._openings)
        for table in tables:
            for known in [a for a in table if a[0] == execution and a[1] <= attempt]:
                del table[known]

    def make(
        self, execution: Execution, request: Request, match: Match, prompt: Prompt, room: int, begun: int = 0
    ) -> Plan:
        """`room`: tokens that fit behind the prompt. `begun`: highest number of a call of this attempt that anybody
        began. The run's sampling settings stand above the request's."""
        attempt = (execution.execution, execution.attempt)
        number = max(execution.contexts.latest_number, self._numbers.get(attempt, 0), begun) + 1
        self._numbers[attempt] = number
        call = call_id(*attempt, number) + self._suffix
        sampling, asked = execution.sampling, request.max_tokens
        limit = min(room, sampling.max_new_tokens, asked if asked is not None else room)
        opening = opening_of(request.messages)
        call_class = self._class(call, execution, request, match, opening)
        if call_class.startswith("main") and attempt not in self._openings:
            self._openings[attempt] = opening_mark(opening)
        return Plan(
            call=call,
            execution=execution.execution,
            attempt=execution.attempt,
            parent=prompt.parent,
            keep=prompt.keep,
            call_class=call_class,
            input_ids=prompt.input_ids,
            sampling=Sampling(sampling.temperature, sampling.top_p, limit),
            request=match.request,
            opening="" if prompt.parent else opening_mark(opening),
            diverged=match.diverged,
            dialect=request.dialect,
        )

    def _class(self, call: str, execution: Execution, request: Request, match: Match, opening: str) -> str:
        first = execution.contexts.opening or self._openings.get((execution.execution, execution.attempt), "")
        parent = execution.contexts.tree.nodes[match.call].call_class if match.call else ""
        around = Surroundings(parent, not first or self._opens_alike(opening, first))
        verdict = classify(self.profile(execution.harness), request, around)
        if not verdict.known:
            self._report(call, execution, verdict.call_class, fingerprint(request))
        return verdict.call_class

    def _opens_alike(self, opening: str, mark: str) -> bool:
        """Remembered, because a first text may be long and comes with every call."""
        place = (hash(opening), mark)
        if place not in self._alike:
            if len(self._alike) >= OPENINGS_REMEMBERED:
                self._alike.clear()
            self._alike[place] = opens_alike(opening, mark)
        return self._alike[place]

    def _report(self, call: str, execution: Execution, call_class: str, seen: str) -> None:
        known = self._reported.setdefault(execution.harness, set())
        kind = seen.partition("; last ")[0]
        if kind in known or len(known) >= FINGERPRINTS_REPORTED:
            return
        known.add(kind)
        log.warning(
            "call %s fits no rule of the profile for harness %r and is recorded as %s: describe it in a profile "
            "(docs/harnesses.md). It has %s",
            call,
            execution.harness,
            call_class,
            seen,
        )
        self._unclassified(
            ModelCallUnclassified(
                call=call,
                execution=execution.execution,
                harness=execution.harness,
                call_class=call_class,
                fingerprint=seen,
            )
        )
