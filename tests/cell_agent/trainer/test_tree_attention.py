"""Tree geometry and attention against the plain definition: a token sees exactly its root-to-token path."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cell_agent.trainer.tree_attention import (
    TreeError,
    padded,
    tree_attention,
    tree_layout,
    tree_mask,
    visible,
)
from shared.microstep import Segment
from tests.cell_agent.trainer.forest import packed_path


@st.composite
def forests(draw: st.DrawFn) -> list[Segment]:
    segments: list[Segment] = []
    start = 0
    for i in range(draw(st.integers(1, 12))):
        length = draw(st.integers(1, 9))
        segments.append(Segment(start, length, draw(st.integers(-1, i - 1))))
        start += length
    return segments


def size(segments: list[Segment]) -> int:
    return segments[-1].start + segments[-1].length


@given(forests())
def test_positions_parents_and_visibility_follow_the_paths(segments: list[Segment]) -> None:
    layout = tree_layout(segments, size(segments))
    sees = visible(layout, slice(0, layout.tokens), np.arange(layout.tokens))
    for number in range(len(segments)):
        path = packed_path(segments, number)
        assert list(layout.positions[path]) == list(range(len(path)))
        assert list(layout.parents[path]) == [-1, *path[:-1]]
        for depth, token in enumerate(path):
            assert sorted(np.nonzero(sees[token])[0]) == sorted(path[: depth + 1])


@settings(deadline=None, max_examples=60)
@given(forests(), st.integers(1, 20), st.sampled_from([1, 2]), st.integers(0, 10_000))
def test_block_attention_equals_dense_attention(segments: list[Segment], block: int, share: int, seed: int) -> None:
    layout = tree_layout(segments, size(segments))
    generator = torch.Generator().manual_seed(seed)
    count, groups, width = layout.tokens, 2, 4

    def fresh(heads: int) -> torch.Tensor:
        return torch.randn(count, heads, width, generator=generator, dtype=torch.float64, requires_grad=True)

    q, k, v = fresh(groups * share), fresh(groups), fresh(groups)
    weights = torch.randn(count, groups * share, width, generator=generator, dtype=torch.float64)
    ours = tree_attention(q, k, v, tree_mask(layout, block=block), 0.3)
    found = torch.autograd.grad((ours * weights).sum(), (q, k, v))
    seen = torch.from_numpy(visible(layout, slice(0, count), np.arange(count)))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(share, 1)) * 0.3
    chances = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    dense = torch.einsum("hqk,khd->qhd", chances, v.repeat_interleave(share, 1))
    wanted = torch.autograd.grad((dense * weights).sum(), (q, k, v))
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@settings(deadline=None, max_examples=40)
@given(forests(), st.integers(1, 4))
def test_context_ranks_together_see_what_one_rank_sees(segments: list[Segment], ranks: int) -> None:
    count = size(segments)
    layout = padded(tree_layout(segments, count), -(-count // ranks) * ranks)
    here = layout.tokens // ranks
    q, k, v = torch.randn(3, layout.tokens, 2, 4, dtype=torch.float64)
    whole = tree_attention(q, k, v, tree_mask(layout), 1.0)
    for rank in range(ranks):
        low = rank * here
        part = tree_attention(q[low : low + here], k, v, tree_mask(layout, low, here), 1.0)
        torch.testing.assert_close(part, whole[low : low + here], rtol=0, atol=1e-12)


@given(forests(), st.integers(1, 50))
def test_blocks_cover_every_query_once(segments: list[Segment], block: int) -> None:
    mask = tree_mask(tree_layout(segments, size(segments)), block=block)
    assert [b.start for b in mask.blocks] + [mask.queries] == [0] + [b.end for b in mask.blocks]
    assert all(0 < b.end - b.start <= block for b in mask.blocks)


@pytest.mark.parametrize(
    ("segments", "tokens"),
    [
        ([], 0),
        ([Segment(0, 3, -1), Segment(4, 2, 0)], 6),
        ([Segment(0, 3, -1), Segment(3, 0, 0)], 3),
        ([Segment(0, 3, 1), Segment(3, 2, -1)], 5),
        ([Segment(0, 3, -1)], 4),
    ],
)
def test_what_is_no_forest_is_refused(segments: list[Segment], tokens: int) -> None:
    with pytest.raises(TreeError):
        tree_layout(segments, tokens)
