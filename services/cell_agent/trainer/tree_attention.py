"""Attention over a forest of token trees that share their prefixes.

Owns the geometry of a micro-step (which token sees which, at which position, and where its logits come from) and the
attention that follows it. Invariant: a token attends to exactly the tokens on its root-to-token path, itself included,
so that one forward over the packed tree gives every path the activations it would have had alone.

Work is done per block of consecutive queries against just the keys that the block can see: its cost follows the sum
of path lengths, not the square of the packed length. On CUDA `flex_attention` takes the same geometry as a block
mask; that path is written from its documentation and has not been run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.microstep import Segment

BLOCK_QUERIES = 192
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TreeError(Exception):
    """The segments of a micro-step do not describe a forest of token trees."""


@dataclass(frozen=True)
class TreeLayout:
    """Geometry of T packed tokens in S segments. Arrays over tokens, `ancestors` over pairs of segments."""

    positions: np.ndarray  # int64 [T]: depth of the token on its path, 0 at a root
    parents: np.ndarray  # int64 [T]: index of the token before it on its path, -1 at a root
    segment: np.ndarray  # int64 [T]: segment the token lies in
    ancestors: np.ndarray  # bool [S, S]: ancestors[i, j] = segment j is i or one of its ancestors

    @property
    def tokens(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class Block:
    """Queries [start, end) (indices of this rank's queries), the runs of keys that any of them sees, and per pair
    whether the query must not see the key; None if it sees all."""

    start: int
    end: int
    runs: tuple[tuple[int, int], ...]
    hidden: Tensor | None  # bool [end - start, keys]


@dataclass
class TreeMask:
    """What Megatron hands through its layers as `attention_mask`. Holds queries [offset, offset + queries) of the
    layout against all its keys (context parallelism splits queries; otherwise offset is 0)."""

    layout: TreeLayout
    offset: int
    queries: int
    blocks: tuple[Block, ...] = ()
    flex: Any = field(default=None, repr=False)  # flex_attention's BlockMask, made on first use
    _biases: dict[tuple[torch.dtype, int], list[Tensor | None]] = field(default_factory=dict, repr=False)

    def biases(self, dtype: torch.dtype, share: int) -> list[Tensor | None]:
        """Per block what is added to the scores of `share` heads of rows: 0, or -inf where hidden. Made once."""
        key = (dtype, share)
        if key not in self._biases:
            self._biases[key] = [
                None
                if block.hidden is None
                else torch.zeros(block.hidden.shape, dtype=dtype)
                .masked_fill_(block.hidden, float("-inf"))
                .repeat(share, 1)[None, None]
                for block in self.blocks
            ]
        return self._biases[key]


def tree_layout(segments: Sequence[Segment], tokens: int) -> TreeLayout:
    """Positions, parents and segment ancestry of a packed forest. Raises TreeError."""
    if not segments:
        raise TreeError("a micro-step needs at least one segment")
    starts = np.array([s.start for s in segments], dtype=np.int64)
    lengths = np.array([s.length for s in segments], dtype=np.int64)
    above = np.array([s.parent for s in segments], dtype=np.int64)
    count = len(segments)
    if (lengths < 1).any() or (starts != np.concatenate([[0], np.cumsum(lengths)[:-1]])).any():
        raise TreeError("segments must follow each other without gaps and have at least one token each")
    if starts[-1] + lengths[-1] != tokens:
        raise TreeError(f"segments cover {starts[-1] + lengths[-1]} tokens, the micro-step has {tokens}")
    if (above >= np.arange(count)).any() or (above < -1).any():
        raise TreeError("a segment's parent must be an earlier segment or -1")
    first = np.zeros(count, dtype=np.int64)  # position of each segment's first token
    ancestors = np.eye(count, dtype=bool)
    for i in range(count):
        if above[i] >= 0:
            first[i] = first[above[i]] + lengths[above[i]]
            ancestors[i] |= ancestors[above[i]]
    segment = np.repeat(np.arange(count), lengths)
    index = np.arange(tokens, dtype=np.int64)
    parents = index - 1
    parents[starts] = np.where(above >= 0, starts[above] + lengths[above] - 1, -1)
    return TreeLayout(index - starts[segment] + first[segment], parents, segment, ancestors)


def padded(layout: TreeLayout, tokens: int) -> TreeLayout:
    """The layout with tokens of no meaning at the end (a root segment of its own), `tokens` in all."""
    extra = tokens - layout.tokens
    if extra == 0:
        return layout
    count = len(layout.ancestors)
    ancestors = np.eye(count + 1, dtype=bool)
    ancestors[:count, :count] = layout.ancestors
    tail = np.arange(extra, dtype=np.int64)
    return TreeLayout(
        np.concatenate([layout.positions, tail]),
        np.concatenate([layout.parents, np.where(tail == 0, -1, tail + layout.tokens - 1)]),
        np.concatenate([layout.segment, np.full(extra, count)]),
        ancestors,
    )


def visible(layout: TreeLayout, queries: slice, keys: np.ndarray) -> np.ndarray:
    """bool [queries, keys]: may the query attend to the key."""
    index = np.arange(layout.tokens)[queries]
    seen: np.ndarray = layout.ancestors[np.ix_(layout.segment[queries], layout.segment[keys])]
    return seen & (keys[None, :] <= index[:, None])


def tree_mask(layout: TreeLayout, offset: int = 0, queries: int | None = None, block: int = BLOCK_QUERIES) -> TreeMask:
    """The mask for queries [offset, offset + queries), cut into blocks of at most `block` queries."""
    queries = layout.tokens - offset if queries is None else queries
    edges = _block_edges(layout.segment[offset : offset + queries], block)
    blocks = tuple(_block(layout, offset, a, b) for a, b in itertools.pairwise(edges))
    return TreeMask(layout, offset, queries, blocks)


def _block_edges(segment: np.ndarray, block: int) -> list[int]:
    """Cut after at most `block` tokens, at a segment's end where that leaves at least half a block."""
    ends = np.concatenate([np.nonzero(np.diff(segment))[0] + 1, [len(segment)]])
    edges = [0]
    while edges[-1] < len(segment):
        limit = edges[-1] + block
        fitting = ends[(ends > edges[-1] + block // 2) & (ends <= limit)]
        edges.append(int(fitting[-1]) if len(fitting) else min(limit, len(segment)))
    return edges


def _block(layout: TreeLayout, offset: int, start: int, end: int) -> Block:
    rows = slice(offset + start, offset + end)
    segments = np.unique(layout.segment[rows])
    wanted = layout.ancestors[segments].any(0)
    keys = np.nonzero(wanted[layout.segment[: offset + end]])[0]
    hidden = ~visible(layout, rows, keys)
    cuts = np.nonzero(np.diff(keys) != 1)[0] + 1
    runs = tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(keys, cuts))
    return Block(start, end, runs, torch.from_numpy(hidden) if hidden.any() else None)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """query [Q, H, D]; key, value [K, G, D] with H a multiple of G; -> [Q, H, D]."""
    if query.is_cuda:
        return _flex(query, key, value, mask, scale)
    result: Tensor = _BlockAttention.apply(query, key, value, mask, scale)
    return result


class _BlockAttention(torch.autograd.Function):  # type: ignore[misc]
    """Softmax attention block by block with torch's CPU flash kernel, which keeps only a log-sum-exp per query. The
    queries of a key-value group are laid out as rows of one matrix, so keys are never repeated."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scale: float) -> Tensor:
        count, heads, size = query.shape
        groups = key.shape[1]
        q = query.view(count, groups, heads // groups, size).permute(1, 2, 0, 3).contiguous()[None]  # 1 G R Q D
        k, v = key.transpose(0, 1).contiguous()[None], value.transpose(0, 1).contiguous()[None]  # 1 G K D
        out, sums = torch.empty_like(q), []
        for block, bias in zip(mask.blocks, mask.biases(q.dtype, heads // groups), strict=True):
            rows = slice(block.start, block.end)
            part, lse = _FLASH(
                _queries(q, rows), _rows(k, block.runs), _rows(v, block.runs), 0.0, False, attn_mask=bias, scale=scale
            )
            out[:, :, :, rows] = part.view(1, groups, -1, block.end - block.start, size)
            sums.append(lse)
        ctx.save_for_backward(q, k, v, out)
        ctx.mask, ctx.scale, ctx.sums = mask, scale, sums
        return out[0].permute(2, 0, 1, 3).reshape(count, heads, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        _, groups, share, count, size = q.shape
        grad = gradients[0].view(count, groups, share, size).permute(1, 2, 0, 3)[None]
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        biases = ctx.mask.biases(q.dtype, share)
        for block, bias, lse in zip(ctx.mask.blocks, biases, ctx.sums, strict=True):
            rows = slice(block.start, block.end)
            keys, values = _rows(k, block.runs), _rows(v, block.runs)
            parts = (_queries(t, rows) for t in (grad, q, out))
            g, queries, result = parts
            part_q, part_k, part_v = _FLASH_BACKWARD(
                g, queries, keys, values, result, lse, 0.0, False, attn_mask=bias, scale=ctx.scale
            )
            dq[:, :, :, rows] = part_q.view(1, groups, share, block.end - block.start, size)
            _scatter(dk, block.runs, part_k)
            _scatter(dv, block.runs, part_v)
        return (
            dq[0].permute(2, 0, 1, 3).reshape(count, -1, size),
            dk[0].transpose(0, 1),
            dv[0].transpose(0, 1),
            None,
            None,
        )


def _queries(q: Tensor, rows: slice) -> Tensor:
    """[1, G, R, Q, D] -> [1, G, R * rows, D]"""
    return q[:, :, :, rows].reshape(1, q.shape[1], -1, q.shape[-1])


def _rows(tensor: Tensor, runs: tuple[tuple[int, int], ...]) -> Tensor:
    if len(runs) == 1:
        return tensor[:, :, runs[0][0] : runs[0][1]]
    return torch.cat([tensor[:, :, a:b] for a, b in runs], 2)


def _scatter(target: Tensor, runs: tuple[tuple[int, int], ...], part: Tensor) -> None:
    at = 0
    for a, b in runs:
        target[:, :, a:b] += part[:, :, at : at + b - a]
        at += b - a


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """CUDA path (unchecked: no GPU was at hand): the same geometry as a flex_attention block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if mask.flex is None:
        segment = torch.from_numpy(mask.layout.segment).to(query.device)
        ancestors = torch.from_numpy(mask.layout.ancestors).to(query.device)
        offset = mask.offset

        def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return ancestors[segment[q + offset], segment[k]] & (k <= q + offset)

        mask.flex = create_block_mask(sees, None, None, mask.queries, mask.layout.tokens, device=str(query.device))
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))  # 1 heads tokens size
    compiled = torch.compile(flex_attention, dynamic=True)
    out: Tensor = compiled(q, k, v, block_mask=mask.flex, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)
