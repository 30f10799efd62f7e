"""The batched CPU attention equals plain attention computed request by request in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cell_agent.engine import cpu_attention

HEADS, SHARED, SIZE, SLOTS, CONTEXT = 4, 2, 8, 200, 40


def reference(query, keys, values, prefix):
    """query [n, heads, size] at positions prefix..; keys and values [length, shared, size]."""
    repeat = HEADS // SHARED
    k, v = (t.double().repeat_interleave(repeat, 1) for t in (keys, values))
    scores = torch.einsum("nhd,lhd->hnl", query.double(), k) / SIZE**0.5
    hidden = torch.arange(keys.shape[0])[None, :] > torch.arange(prefix, prefix + query.shape[0])[:, None]
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def world(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(SLOTS, SHARED, SIZE, generator=generator) for _ in range(2))
    table = torch.randint(0, SLOTS, (len(lengths) + 2, CONTEXT), generator=generator, dtype=torch.int32)
    requests = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    return generator, k, v, table, requests, torch.tensor(lengths)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=6), st.integers(0, 99))
def test_decode(lengths, seed):
    generator, k, v, table, requests, lens = world(lengths, seed)
    query = torch.randn(len(lengths), HEADS, SIZE, generator=generator)
    out = cpu_attention.decode(query, torch.empty_like(query), k, v, table, requests, lens, SIZE**-0.5)
    for i, (request, length) in enumerate(zip(requests.tolist(), lengths, strict=True)):
        slots = table[request, :length].long()
        want = reference(query[i : i + 1], k[slots], v[slots], length - 1)
        torch.testing.assert_close(out[i : i + 1].double(), want, atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=5), st.integers(0, 99))
def test_extend(shapes, seed):
    generator, k, v, table, requests, lens = world([p + n for p, n in shapes], seed)
    prefixes, news = (torch.tensor(x) for x in zip(*shapes, strict=True))
    query = torch.randn(int(news.sum()), HEADS, SIZE, generator=generator)
    out = cpu_attention.extend(
        query, torch.empty_like(query), k, v, table, requests, lens, prefixes, news, SIZE**-0.5, True
    )
    start = 0
    for request, (prefix, new) in zip(requests.tolist(), shapes, strict=True):
        slots = table[request, : prefix + new].long()
        want = reference(query[start : start + new], k[slots], v[slots], prefix)
        torch.testing.assert_close(out[start : start + new].double(), want, atol=1e-5, rtol=1e-5)
        start += new
