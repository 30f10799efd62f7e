"""Which paths of an execution are trained.

Owns: the leaf rule, the J_max draw and the mask. Invariant: a generated token is newly trained by at most one
selected path of its execution, and nothing but tokens that the policy generated on that path is trained.

Source of the draw: QwenGyre, trajectory processor (leaf classes, at most J_max = 5 root-to-leaf paths, a leaf drawn
in proportion to its unmasked tokens inside the highest class that still has some, its path masked, repeated).

What is trainable:
- Output tokens of calls, in the context in which they were generated. Everything in a call's `input_ids` is context:
  prompts, tool results, turns that a harness repeats after a compaction, text that it put into the policy's mouth.
- A leaf is a generation that nothing kept inherits whole. So a reply that the harness changed (its next call is
  `diverged` and keeps only part of it) is a leaf of its own: the policy wrote it, and the workspace felt it.
- A discarded generation (its response never reached the harness whole) is no leaf, nor is an auxiliary call (titles
  and the like) or a call without output: they cover nobody and are not trained for their own sake. If a leaf's path
  inherits tokens of one of them, they are trained there like all others.
- The first token of a context without a prompt has no logits before it and is never trainable.

A path inherits from each of its calls a prefix of the output (`kept` cuts only at the end), so a mask is one number
per call.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.tree import CLASSES, Node, Tree

TRAINABLE_CLASSES = tuple(name for name in CLASSES if name != "auxiliary")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Selected:
    """One selected path: its ids up to the last trained token, and the tokens that it newly trains."""

    leaf: str
    call_class: str
    ids: npt.NDArray[np.int32]  # [n], a prefix of tree.ids(leaf)
    positions: npt.NDArray[np.int32]  # [m], ascending, each >= 1: index into ids of a newly trained token
    logprobs: npt.NDArray[np.float32]  # [m], as recorded


@dataclass(eq=False)
class _Leaf:
    call: str
    numbers: Ints  # calls of the path, as indices in recording order
    visible: Ints  # output tokens of each that the path contains


def eligible(node: Node) -> bool:
    """Whether the call may be a leaf at all."""
    return bool(len(node.output_ids)) and not node.discarded and node.call_class in TRAINABLE_CLASSES


def training_leaves(tree: Tree) -> list[str]:
    """Eligible calls whose ids no path to another such leaf contains whole, in recording order."""
    covered: dict[str, int] = {}  # call -> ids of it that some leaf's path contains
    leaves = []
    for node in reversed(tree.nodes.values()):
        reach = covered.get(node.call, 0)
        if reach < node.length and eligible(node):
            leaves.append(node.call)
            reach = node.length
        if node.parent:
            covered[node.parent] = max(covered.get(node.parent, 0), min(reach, node.kept))
    leaves.reverse()
    return leaves


def select(tree: Tree, execution: str, *, seed: int, j_max: int) -> list[Selected]:
    """At most `j_max` paths, in the order drawn. Deterministic in (tree, execution, seed)."""
    numbers = {call: i for i, call in enumerate(tree.nodes)}
    masked = np.array([int(node.prompt_length == 0) for node in tree.nodes.values()], dtype=np.int64)
    classes: dict[str, list[_Leaf]] = {name: [] for name in TRAINABLE_CLASSES}
    for call in training_leaves(tree):
        classes[tree.nodes[call].call_class].append(_leaf(tree, call, numbers))
    chosen: list[Selected] = []
    while len(chosen) < j_max:
        leaf = _draw(classes, masked, f"{seed}:{execution}:{len(chosen)}")
        if leaf is None:
            break
        chosen.append(_take(tree, leaf, masked))
    return chosen


def _leaf(tree: Tree, call: str, numbers: dict[str, int]) -> _Leaf:
    path = tree.path(call)
    visible = np.zeros(len(path), dtype=np.int64)
    limit = path[-1].length
    for i in range(len(path) - 1, -1, -1):
        visible[i] = max(0, min(path[i].length, limit) - path[i].prompt_length)
        limit = min(limit, path[i].kept)
    return _Leaf(call, np.array([numbers[node.call] for node in path], dtype=np.int64), visible)


def _unmasked(leaf: _Leaf, masked: Ints) -> int:
    return int(np.maximum(leaf.visible - masked[leaf.numbers], 0).sum())


def _draw(classes: dict[str, list[_Leaf]], masked: Ints, label: str) -> _Leaf | None:
    for leaves in classes.values():
        counts = [_unmasked(leaf, masked) for leaf in leaves]
        total = sum(counts)
        if not total:
            continue
        ticket = int.from_bytes(blake2b(label.encode(), digest_size=16).digest(), "little") % total
        for leaf, count in zip(leaves, counts, strict=True):
            ticket -= count
            if ticket < 0:
                return leaf
    return None


def _take(tree: Tree, leaf: _Leaf, masked: Ints) -> Selected:
    """Cut the path's new tokens out of the tree and mask the path."""
    positions: list[npt.NDArray[Any]] = []
    logprobs: list[npt.NDArray[Any]] = []
    for node, number, stop in zip(tree.path(leaf.call), leaf.numbers, leaf.visible, strict=True):
        first = masked[number]
        if stop > first:
            positions.append(np.arange(node.prompt_length + first, node.prompt_length + stop, dtype=np.int32))
            logprobs.append(node.output_logprobs[first:stop])
            masked[number] = stop
    where = np.concatenate(positions)
    return Selected(
        leaf=leaf.call,
        call_class=tree.nodes[leaf.call].call_class,
        ids=tree.ids(leaf.call)[: int(where[-1]) + 1],
        positions=where,
        logprobs=np.concatenate(logprobs),
    )
