"""The trajectory tree of one execution, built from its ModelCallRecorded events.

A node is one model call and holds only what the call added: `input_ids` (context that its parent did not have) and
`output_ids` (what the policy generated). A call that continues its parent inherits the first `kept` ids of the parent.

Invariant: concatenating the increments along a path, each cut to what its child keeps, gives the exact ids the engine
saw and produced: ids(call) = ids(parent)[:kept] + input_ids + output_ids. Every generated token belongs to exactly one
node, and its log-probability and policy version are those reported when it was generated.

A record of a later attempt replaces the whole tree (the earlier process and workspace are gone); a record of an earlier
attempt, and a second record of the same call, change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.codec import unpack_floats, unpack_ids
from shared.events import ModelCallRecorded, VersionSpan

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

CLASSES = ("main_task", "main_summary", "sub_task", "sub_summary", "auxiliary")
"""Call classes in the order in which selection prefers them; auxiliary calls are never selected."""


class TreeError(ValueError):
    """A record that cannot be a node of this tree."""


class Generated(NamedTuple):
    """Per token of ids(call) [n]: was it generated, with which log-probability, by which node of path(call)."""

    mask: Mask
    logprobs: Floats  # 0 where not generated
    owner: Ids  # index into path(call), -1 where not generated


@dataclass(slots=True, eq=False)
class Node:
    """One recorded call. `prompt_length` = kept + new input ids; `length` = prompt + output."""

    call: str
    parent: str
    kept: int
    call_class: str
    input_ids: Ids
    output_ids: Ids
    output_logprobs: Floats
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    context: str
    diverged: bool
    discarded: bool
    children: list[str] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        return self.kept + len(self.input_ids)

    @property
    def length(self) -> int:
        return self.kept + len(self.input_ids) + len(self.output_ids)


class Tree:
    """All recorded calls of one attempt of one execution."""

    def __init__(self) -> None:
        self.execution = ""
        self.attempt = 0
        self.nodes: dict[str, Node] = {}  # in recording order, so parents come before children

    def add(self, record: ModelCallRecorded) -> Node | None:
        """Add the record's node and return it; None if the record is of an earlier attempt or already there."""
        if self.execution and record.execution != self.execution:
            raise TreeError(f"call {record.call} belongs to {record.execution}, this is the tree of {self.execution}")
        if record.attempt < self.attempt or (record.attempt == self.attempt and record.call in self.nodes):
            return None
        if record.attempt > self.attempt:
            self.nodes.clear()
        self.execution, self.attempt = record.execution, record.attempt
        node = self._node(record)
        self.nodes[node.call] = node
        if node.parent:
            self.nodes[node.parent].children.append(node.call)
        return node

    def _node(self, record: ModelCallRecorded) -> Node:
        inherited = 0
        if record.parent:
            parent = self.nodes.get(record.parent)
            if parent is None:
                raise TreeError(f"call {record.call} continues {record.parent}, which is not in the tree")
            inherited = parent.length
        kept = inherited if record.keep < 0 else record.keep
        output_ids, logprobs = unpack_ids(record.output_ids), unpack_floats(record.output_logprobs)
        if kept > inherited:
            raise TreeError(f"call {record.call} keeps {kept} ids of a parent that has {inherited}")
        if len(output_ids) != len(logprobs):
            counts = f"{len(output_ids)} output ids and {len(logprobs)} log-probabilities"
            raise TreeError(f"call {record.call} has {counts}")
        return Node(
            call=record.call,
            parent=record.parent,
            kept=kept,
            call_class=record.call_class,
            input_ids=unpack_ids(record.input_ids),
            output_ids=output_ids,
            output_logprobs=logprobs,
            versions=record.versions,
            finish_reason=record.finish_reason,
            context=record.context,
            diverged=record.diverged,
            discarded=record.discarded,
        )

    def mark(self, call: str, attempt: int, *, discarded: bool) -> None:
        """Correct whether the harness got the call's reply (ModelCallMarked); unknown calls change nothing."""
        if attempt == self.attempt and call in self.nodes:
            self.nodes[call].discarded = discarded

    def path(self, call: str) -> list[Node]:
        """Nodes from the root's child down to `call`."""
        nodes = []
        while call:
            node = self.nodes[call]
            nodes.append(node)
            call = node.parent
        nodes.reverse()
        return nodes

    def ids(self, call: str) -> Ids:
        """Prompt + output of `call`, int32 [length]."""
        return self.part(call, 0, self.nodes[call].length)

    def part(self, call: str, start: int, stop: int) -> Ids:
        """ids(call)[start:stop], at the cost of the nodes that hold them. 0 <= start <= stop <= length."""
        out = np.empty(stop - start, dtype=np.int32)
        while stop > start:
            node = self.nodes[call]
            for begin, ids in ((node.kept, node.input_ids), (node.prompt_length, node.output_ids)):
                first, last = max(begin, start), min(begin + len(ids), stop)
                if last > first:
                    out[first - start : last - start] = ids[first - begin : last - begin]
            stop, call = min(stop, node.kept), node.parent
        return out

    def prompt_ids(self, call: str) -> Ids:
        """What the engine was given for `call`, int32 [prompt_length]."""
        return self.ids(call)[: self.nodes[call].prompt_length]

    def generated(self, call: str) -> Generated:
        """Provenance of every token of ids(call)."""
        n = self.nodes[call].length
        result = Generated(np.zeros(n, np.bool_), np.zeros(n, np.float32), np.full(n, -1, np.int32))
        for piece in self._pieces(call):
            start, stop = piece.node.prompt_length, piece.stop
            if stop > start:
                result.mask[start:stop] = True
                result.logprobs[start:stop] = piece.node.output_logprobs[: stop - start]
                result.owner[start:stop] = piece.place
        return result

    def token_versions(self, call: str) -> Ids:
        """Policy version that generated each token of ids(call), -1 where not generated, int32 [length]."""
        versions = np.full(self.nodes[call].length, -1, dtype=np.int32)
        for piece in self._pieces(call):
            base = piece.node.prompt_length
            for span in piece.node.versions:
                stop = min(piece.stop, base + span.end)
                if stop > base + span.start:
                    versions[base + span.start : stop] = span.version
        return versions

    def _pieces(self, call: str) -> Iterator[_Piece]:
        """The part [start, stop) of ids(call) that each node of the path contributes, leaf first; may be empty."""
        path = self.path(call)
        limit = self.nodes[call].length
        for index in range(len(path) - 1, -1, -1):
            node = path[index]
            stop = min(node.length, limit)
            if stop > node.kept:
                yield _Piece(node, index, node.kept, stop)
            limit = min(limit, node.kept)

    def leaves(self, *, discarded: bool = False) -> list[str]:
        """Calls that nothing continues, in recording order. Discarded calls (the harness never got the response) do
        not count, neither as leaves nor as continuations, unless `discarded` is true or a live call continues them."""
        followed: set[str] = set()
        leaves = []
        for node in reversed(self.nodes.values()):
            if node.call not in followed:
                if node.discarded and not discarded:
                    continue
                leaves.append(node.call)
            if node.parent:
                followed.add(node.parent)
        leaves.reverse()
        return leaves

    def leaves_by_class(self) -> dict[str, list[str]]:
        """Live leaves under their call class, classes in selection order; absent classes are left out."""
        found: dict[str, list[str]] = {}
        for call in self.leaves():
            found.setdefault(self.nodes[call].call_class, []).append(call)
        return {name: found[name] for name in sorted(found, key=_class_rank)}

    def tokens(self) -> dict[str, int]:
        """Token counts over the whole tree: `context` (new input) and `generated`, each token once."""
        return {
            "context": sum(len(n.input_ids) for n in self.nodes.values()),
            "generated": sum(len(n.output_ids) for n in self.nodes.values()),
        }


class _Piece(NamedTuple):
    node: Node
    place: int  # index of the node in the path
    start: int
    stop: int


def _class_rank(name: str) -> tuple[int, str]:
    return (CLASSES.index(name), "") if name in CLASSES else (len(CLASSES), name)
