"""From a request to the prompt's ids: which call it continues, and the encoding of what is new.

Invariant: a prompt is the exact ids of the call that it continues plus the encoding of what is new; only what no call
can give is rendered whole. Long texts are encoded in a thread, so that no other call waits for them.
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
from services.proxy.profiles import Profile
from services.proxy.rendering import Rendering

Ids = npt.NDArray[np.int32]

THREAD_ABOVE = 20_000
"""Characters of new text (about 2 ms of encoding) from which on a thread encodes them."""
IDS_KEPT = 64 * 2**20
"""Token ids of latest calls that are kept ready (256 MB); others are put together from their tree."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids(parent)[:keep] + input_ids; keep -1 = all of the parent."""

    parent: str
    keep: int
    input_ids: Ids
    ids: Ids


class Prompts:
    def __init__(self, rendering: Rendering, profile_of: Callable[[str], Profile]) -> None:
        self._rendering, self._profile_of = rendering, profile_of
        self._ids: OrderedDict[str, Ids] = OrderedDict()
        self._kept = 0

    def match(self, execution: Execution, request: Request) -> Match:
        def payloads(call: str) -> tuple[str, ...]:
            tree = execution.contexts.tree
            parsed = self._rendering.parse(tree.nodes[call].output_ids, tree.prompt_ids(call), request.tools)
            return replies.payloads(parsed)

        fold = self._profile_of(execution.harness).patterns
        return execution.contexts.match(request.messages, request.tools, payloads, fold)

    async def prompt(self, execution: Execution, request: Request, match: Match) -> Prompt:
        if match.call:
            node = execution.contexts.tree.nodes[match.call]
            before, cut = self.ids(execution, match.call), node.prompt_length
            end = cut + execution.contexts.delivered.get(match.call, len(before) - cut)
            extension = await _encode(
                match.new, self._rendering.extend, before[:cut], before[cut:end], match.new, request.tools
            )
            if extension is not None:
                keep = -1 if extension.keep == node.length else extension.keep
                new = np.asarray(extension.ids, dtype=np.int32)
                return Prompt(match.call, keep, new, np.concatenate((before[: extension.keep], new)))
        fresh = await _encode(request.messages, self._rendering.fresh, request.messages, request.tools)
        ids = np.asarray(fresh, dtype=np.int32)
        return Prompt("", -1, ids, ids)

    # ----------------------------------------------------------------------------------------------- ids of calls

    def ids(self, execution: Execution, call: str) -> Ids:
        """Prompt + output of a recorded call."""
        known = self._ids.get(call)
        return known if known is not None else execution.contexts.tree.ids(call)

    def remember(self, call: str, parent: str, prompt: Ids, output: Ids) -> None:
        """Keep the ids of a call that was just recorded, in place of those of the call that it continues."""
        self._drop(parent)
        self._ids[call] = np.concatenate((prompt, output))
        self._kept += len(self._ids[call])
        while self._kept > IDS_KEPT:
            self._drop(next(iter(self._ids)))

    def forget(self, execution: str) -> None:
        for call in [c for c in self._ids if c.startswith(f"{execution}a")]:
            self._drop(call)

    def _drop(self, call: str) -> None:
        old = self._ids.pop(call, None)
        if old is not None:
            self._kept -= len(old)


async def _encode(messages: tuple[Message, ...], work: Callable[..., Any], *arguments: Any) -> Any:
    if sum(len(m.text) + sum(len(c.arguments) for c in m.tool_calls) for m in messages) <= THREAD_ABOVE:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)
