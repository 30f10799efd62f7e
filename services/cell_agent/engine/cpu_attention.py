"""Attention of SGLang's torch_native backend for a whole batch at once, on a CPU.

SGLang's own loops take one request at a time and, when a prompt is extended, compute its cached prefix's rows again. On
a CPU that is most of a small model's time. Same arithmetic, same cache layout; anything unusual (encoder lengths,
cross attention, sliding windows) goes to SGLang's own functions.

Shapes: query and output [tokens, heads, head size]; caches [slots, key/value heads, head size]; `req_to_token`
[requests, context] names the cache slot of each position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def decode(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """One new token per request: requests are padded to the longest, heads that share a key become query rows."""
    requests, heads, size = query.shape
    shared = k_cache.shape[1]
    longest = int(seq_lens.max())
    slots = req_to_token[req_pool_indices, :longest].reshape(-1)
    keys = k_cache.index_select(0, slots).view(requests, longest, shared, size).transpose(1, 2)
    values = v_cache.index_select(0, slots).view(requests, longest, shared, -1).transpose(1, 2)
    seen = torch.arange(longest) < seq_lens[:, None]
    rows = query.view(requests, shared, heads // shared, size)
    mask = seen[:, None, None, :]
    found = scaled_dot_product_attention(
        rows, keys.to(rows.dtype), values.to(rows.dtype), attn_mask=mask, scale=scaling
    )
    output.copy_(found.reshape(requests, heads, -1))
    return output


def extend(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    scaling: float | None,
    causal: bool,
) -> torch.Tensor:
    """New tokens of each request against its cached prefix and themselves; only the new rows are computed."""
    start = 0
    rows = zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True
    )
    for request, length, prefix, new in rows:
        slots = req_to_token[request, :length]
        queries = query[start : start + new].transpose(0, 1)[None]
        keys = k_cache.index_select(0, slots).transpose(0, 1)[None].to(query.dtype)
        values = v_cache.index_select(0, slots).transpose(0, 1)[None].to(query.dtype)
        mask = None
        if causal and prefix:
            mask = torch.arange(length) <= torch.arange(prefix, length)[:, None]
        found = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal and not prefix,
            scale=scaling,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        output[start : start + new] = found[0].transpose(0, 1)
        start += new
    return output


def _usual(encoder_lens: Any, is_cross_attn: bool, sliding_window_size: int | None) -> bool:
    return encoder_lens is None and not is_cross_attn and (sliding_window_size is None or sliding_window_size <= -1)


def install() -> None:
    """Put both in the place of SGLang's loops. Called before the server starts."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    own_decode = TorchNativeAttnBackend._run_sdpa_forward_decode
    own_extend = TorchNativeAttnBackend._run_sdpa_forward_extend

    def run_decode(
        self: Any, query: Any, output: Any, k_cache: Any, v_cache: Any, req_to_token: Any, req_pool_indices: Any,
        seq_lens: Any, encoder_lens: Any = None, scaling: Any = None, enable_gqa: bool = False, causal: bool = False,
        is_cross_attn: bool = False, sliding_window_size: int | None = None,
    ) -> Any:  # fmt: skip
        if _usual(encoder_lens, is_cross_attn, sliding_window_size):
            return decode(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, scaling)
        return own_decode(
            self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, scaling,
            enable_gqa, causal, is_cross_attn, sliding_window_size,
        )  # fmt: skip

    def run_extend(
        self: Any, query: Any, output: Any, k_cache: Any, v_cache: Any, req_to_token: Any, req_pool_indices: Any,
        seq_lens: Any, extend_prefix_lens: Any, extend_seq_lens: Any, encoder_lens: Any = None, scaling: Any = None,
        enable_gqa: bool = False, causal: bool = False, is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Any:  # fmt: skip
        if _usual(encoder_lens, is_cross_attn, sliding_window_size):
            return extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, scaling, causal,
            )  # fmt: skip
        return own_extend(
            self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
        )  # fmt: skip

    TorchNativeAttnBackend._run_sdpa_forward_decode = run_decode
    TorchNativeAttnBackend._run_sdpa_forward_extend = run_extend
