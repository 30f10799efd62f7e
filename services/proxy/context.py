"""Which recorded call an incoming conversation continues.

Every recorded call has two keys in the hash chain of canonical.py: `request`, of the conversation that it was asked to
continue, and `context`, of that conversation with its reply. A new conversation continues the call with the longest
beginning of it as context; an assistant turn that carries our tool-call ids is taken for the turn of that call even if
the harness reworded it, as long as everything before it is the same.

Invariant: a match only ever says that the ids of the matched call are the beginning of the new prompt. Whatever does
not match makes a branch, never an error. Every message is put into canonical form once: the chain's steps are
remembered by (key before, hash of the message), and the chain is followed from where the last conversations with the
same beginning had matched, so that a call costs work on its new messages only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from services.proxy import canonical
from services.proxy.dialects.base import Message, Tool
from shared.events import ModelCallMarked, ModelCallRecorded
from shared.tree import Node, Tree

STEPS_KEPT = 50_000
"""Remembered steps of one execution (about 300 bytes each); beyond them all are forgotten and made again."""

REACHED_KEPT = 8
"""Lines of work of which the latest match is remembered."""

Payloads = Callable[[str], tuple[str, ...]]
"""call id -> canonical forms of the tool calls the policy made in it."""


@dataclass(frozen=True, slots=True)
class Match:
    """`call` is "" if nothing matched; `new` is what comes after the matched turns."""

    request: str
    call: str
    new: tuple[Message, ...]
    diverged: bool  # the harness changed a turn of the policy that the match goes through


class Step(NamedTuple):
    """What one message does to the chain: the key after it, and the call whose turn it is ("" if it is none's)."""

    after: bytes
    call: str
    changed: bool  # the turn is the call's, but not as the policy generated it


class Reached(NamedTuple):
    """How far a conversation under the tools `root` matched: `messages` end with the turn of `call`, `key` is the key
    after it."""

    root: bytes
    messages: tuple[Message, ...]
    key: bytes
    call: str
    changed: bool


class Contexts:
    """The tree of one execution, and its calls by context and by request."""

    def __init__(self, execution: str) -> None:
        self.execution = execution
        self.tree = Tree()
        self.opening = ""  # mark of the first text of the main line
        self.latest_number = 0
        self.delivered: dict[str, int] = {}  # calls of which only so many output tokens are continued
        self._by_context: dict[str, str] = {}
        self._by_request: dict[str, str] = {}
        self._request_of: dict[str, str] = {}
        self._payloads: dict[str, tuple[str, ...]] = {}
        self._steps: dict[tuple[bytes, int], Step] = {}
        self._reached: list[Reached] = []  # latest first

    def add(self, record: ModelCallRecorded) -> Node | None:
        """Take a record in; a record of a later attempt forgets all before it."""
        if record.attempt > self.tree.attempt:
            self._forget()
        node = self.tree.add(record)
        if node is None:
            return None
        self.latest_number = max(self.latest_number, canonical.call_number(record.call))
        if record.opening and not self.opening and record.call_class.startswith("main"):
            self.opening = record.opening
        if record.delivered >= 0:
            self.delivered[record.call] = record.delivered
        if record.context:
            self._by_context[record.context] = record.call
        if record.request:
            self._by_request[record.request] = record.call
            self._request_of[record.call] = record.request
        return node

    def mark(self, event: ModelCallMarked) -> None:
        self.tree.mark(event.call, event.attempt, discarded=event.discarded)

    def _forget(self) -> None:
        self.opening, self.latest_number = "", 0
        for table in (self.delivered, self._by_context, self._by_request, self._request_of, self._payloads):
            table.clear()
        self._steps.clear()
        self._reached.clear()

    def remember(self, call: str, payloads: tuple[str, ...]) -> None:
        """The canonical tool calls of a call that is about to be recorded."""
        self._payloads[call] = payloads

    def by_request(self, request: str) -> Node | None:
        """The latest call that was asked to continue the same conversation."""
        call = self._by_request.get(request)
        return self.tree.nodes[call] if call else None

    # --------------------------------------------------------------------------------------------------- matching

    def match(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Tool, ...],
        payloads: Payloads,
        fold: Iterable[re.Pattern[str]] = (),
    ) -> Match:
        """Find the call that `messages` continue. `payloads` is asked at most once per call whose ids appear."""
        restore = self._restorer(payloads)
        root = canonical.root_of(tools)
        before = self._reached_by(root, messages)
        key, call, matched, diverged = (before.key, before.call, len(before.messages), before.changed)
        latest = (key, diverged)  # at the last turn that matched
        for i, message in enumerate(messages[matched:], matched):
            place = (key, hash(message))
            step = self._steps.get(place)
            if step is None:
                step = self._step(key, message, restore, fold)
                self._keep(place, step, message)
            if message.role == "assistant":
                known = step.call or self._by_context.get(step.after.hex(), "")
                if known:
                    call, matched, diverged = known, i + 1, step.changed
                    latest = (step.after, step.changed)
                elif key.hex() in self._by_request:
                    diverged = True  # a turn that replaces what the policy said here
            key = step.after
        if matched > len(before.messages):
            reached = Reached(root, messages[:matched], latest[0], call, latest[1])
            self._reached = [reached, *(r for r in self._reached if r is not before)][:REACHED_KEPT]
        if matched == len(messages):  # an assistant turn at the end: nothing new to encode, so no continuation
            call, matched, diverged = "", 0, False
        return Match(key.hex(), call, messages[matched:], diverged)

    def _reached_by(self, root: bytes, messages: tuple[Message, ...]) -> Reached:
        """The longest remembered match that `messages` begin with. Messages that were read together with those of an
        earlier body are the same objects (bodies.py), which makes this a comparison of addresses."""
        found = Reached(root, (), root, "", False)
        for reached in self._reached:
            length = len(reached.messages)
            if reached.root == root and length > len(found.messages) and messages[:length] == reached.messages:
                found = reached
        return found

    def _keep(self, place: tuple[bytes, int], step: Step, message: Message) -> None:
        """What a turn with tool calls is depends on what is recorded by now, unless it is known already."""
        if message.tool_calls and not step.call:
            return
        if len(self._steps) >= STEPS_KEPT:
            self._steps.clear()
        self._steps[place] = step

    def _step(self, key: bytes, message: Message, restore: canonical.Restore, fold: Iterable[re.Pattern[str]]) -> Step:
        after = canonical.step(key, canonical.message(message, restore, fold=fold))
        mine = self._own_turn(message, key.hex()) if message.role == "assistant" else None
        if mine is None:
            return Step(after, "", False)
        context = bytes.fromhex(self.tree.nodes[mine].context)
        return Step(context, mine, context != after or self._reworded(message, restore))

    def _own_turn(self, message: Message, request: str) -> str | None:
        """The call whose tool-call ids `message` carries, if it was asked to continue this very conversation."""
        for tool_call in message.tool_calls:
            found = canonical.OUR_TOOL_ID.match(tool_call.id)
            call = self._call_of(found[1]) if found else None
            if call is not None and self._request_of.get(call) == request and self.tree.nodes[call].context:
                return call
        return None

    def _reworded(self, message: Message, restore: canonical.Restore) -> bool:
        """Whether the arguments mean something else than what the policy generated."""
        for tool_call in message.tool_calls:
            found = canonical.OUR_TOOL_ID.match(tool_call.id)
            original = restore(found[1], int(found[2])) if found else None
            if original is not None and original != canonical.tool_call(tool_call):
                return True
        return False

    def _call_of(self, tag: str) -> str | None:
        call = canonical.call_of(self.execution, tag)
        return call if call in self.tree.nodes else None

    def _restorer(self, payloads: Payloads) -> canonical.Restore:
        def restore(tag: str, position: int) -> str | None:
            call = self._call_of(tag)
            if call is None:
                return None
            if call not in self._payloads:
                self._payloads[call] = payloads(call)
            own = self._payloads[call]
            return own[position] if position < len(own) else None

        return restore


def opening_of(messages: tuple[Message, ...]) -> str:
    """The first user text of a conversation."""
    return next((canonical.text(m.text) for m in messages if m.role == "user"), "")


def opening_mark(text: str) -> str:
    return f"{len(text)}:{canonical.digest(text)}"


def opens_alike(text: str, mark: str) -> bool:
    """Whether `text` begins with the text that `mark` was made of (a compacted line keeps its task in front)."""
    length, _, digest = mark.partition(":")
    return bool(mark) and canonical.digest(text[: int(length)]) == digest
