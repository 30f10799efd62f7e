"""From a request to the prompt's ids: which call it continues, and the encoding of what is new.

Invariant: a prompt is the exact ids of the call that it continues plus the encoding of what is new; only what no call
can give is rendered whole. Long texts are encoded in a thread, so that no other call waits for them. Ids are written as
JSON for the engine once, when they are new.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.proxy import replies
from services.proxy.context import Match
from services.proxy.core import Execution
from services.proxy.dialects.base import Message, Request
from services.proxy.pieces import Pieces, extended, written
from services.proxy.profiles import Profile
from services.proxy.rendering import Rendering
from shared.tree import Tree

Ids = npt.NDArray[np.int32]

THREAD_ABOVE = 20_000
"""Characters of new text (about 2 ms of encoding) from which on a thread encodes them."""
BYTES_KEPT = 512 * 2**20
"""JSON of the latest calls' ids that is kept ready; that of others is written again from their tree."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids(parent)[:keep] + input_ids, `length` ids in all; keep -1 = all of the parent. `tail`: the last of them, as
    many as the renderer looks back on. `pieces`: all of them."""

    parent: str
    keep: int
    input_ids: Ids
    length: int
    tail: Ids
    pieces: Pieces


class Prompts:
    def __init__(self, rendering: Rendering, profile_of: Callable[[str], Profile]) -> None:
        self._rendering, self._profile_of = rendering, profile_of
        self._pieces: OrderedDict[str, tuple[Pieces, int]] = OrderedDict()  # of a call's prompt and output; bytes
        self._kept = 0

    def match(self, execution: Execution, request: Request) -> Match:
        def payloads(call: str) -> tuple[str, ...]:
            tree = execution.contexts.tree
            parsed = self._rendering.parse(tree.nodes[call].output_ids, self._seen_before(tree, call), request.tools)
            return replies.payloads(parsed)

        fold = self._profile_of(execution.harness).patterns
        return execution.contexts.match(request.messages, request.tools, payloads, fold)

    async def prompt(self, execution: Execution, request: Request, match: Match) -> Prompt:
        if match.call:
            tree, delivered = execution.contexts.tree, execution.contexts.delivered
            node, seen = tree.nodes[match.call], self._seen_before(tree, match.call)
            output = node.output_ids[: delivered.get(match.call, len(node.output_ids))]
            before = node.prompt_length - len(seen)
            extension = await _encode(match.new, self._rendering.extend, seen, output, match.new, request.tools, before)
            if extension is not None:
                keep = -1 if extension.keep == node.length else extension.keep
                return self._continued(tree, match.call, keep, np.asarray(extension.ids, dtype=np.int32))
        fresh = await _encode(request.messages, self._rendering.fresh, request.messages, request.tools)
        ids = np.asarray(fresh, dtype=np.int32)
        return Prompt("", -1, ids, len(ids), ids[-self._rendering.lookback :], (written(ids),))

    def exact(self, parent: str, keep: int, new: Ids, ids: Ids) -> Prompt:
        """A prompt whose ids are known: those of another process of the proxy."""
        return Prompt(parent, keep, new, len(ids), ids[-self._rendering.lookback :], (written(ids),))

    def _continued(self, tree: Tree, call: str, keep: int, new: Ids) -> Prompt:
        inherited = tree.nodes[call].length if keep < 0 else keep
        tail = np.concatenate((tree.part(call, max(0, inherited - self._rendering.lookback), inherited), new))
        pieces = self._pieces_of(tree, call) if keep < 0 else (written(tree.part(call, 0, keep)),)
        return Prompt(call, keep, new, inherited + len(new), tail, extended(pieces, new))

    def _seen_before(self, tree: Tree, call: str) -> Ids:
        """The last ids of the call's prompt, as many as the renderer looks back on."""
        end = tree.nodes[call].prompt_length
        return tree.part(call, max(0, end - self._rendering.lookback), end)

    # ----------------------------------------------------------------------------------------------- ids of calls

    def ids(self, execution: Execution, call: str) -> Ids:
        """Prompt + output of a recorded call."""
        return execution.contexts.tree.ids(call)

    def _pieces_of(self, tree: Tree, call: str) -> Pieces:
        known = self._pieces.get(call)
        return known[0] if known is not None else (written(tree.ids(call)),)

    def remember(self, call: str, prompt: Prompt, output: Ids) -> None:
        """Keep the ids of a call that was just recorded, in place of those of the call that it continues."""
        self._drop(prompt.parent)
        pieces = extended(prompt.pieces, output)
        size = sum(map(len, pieces))
        self._pieces[call] = pieces, size
        self._kept += size
        while self._kept > BYTES_KEPT:
            self._drop(next(iter(self._pieces)))

    def forget(self, execution: str) -> None:
        for call in [c for c in self._pieces if c.startswith(f"{execution}a")]:
            self._drop(call)

    def _drop(self, call: str) -> None:
        old = self._pieces.pop(call, None)
        if old is not None:
            self._kept -= old[1]


async def _encode(messages: tuple[Message, ...], work: Callable[..., Any], *arguments: Any) -> Any:
    if sum(len(m.text) + sum(len(c.arguments) for c in m.tool_calls) for m in messages) <= THREAD_ABOVE:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)
