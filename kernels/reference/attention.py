"""Sparse attention over listed keys with a sink. Source: `spec/model.md` section 4.2."""

from __future__ import annotations

import torch
from torch import Tensor

KEY_BLOCK = 64
"""List entries of one online-softmax block. Part of the numerics: probabilities are rounded to BF16 relative to the
running maximum of the blocks seen so far."""


def sparse_attention(
    q: Tensor, keys: Tensor, is_valid: Tensor, sinks: Tensor, scale: float, accumulate: torch.dtype
) -> Tensor:
    """Attention of each query over its own key list, K = V.

    Args:
        q: `[num_rows, num_heads, head_dim]` bf16.
        keys: `[num_rows, num_keys, head_dim]` bf16, in list order (window oldest first, then selected entries).
        is_valid: `[num_rows, num_keys]` bool; entries that are not count in the blocks but are never attended to.
        sinks: `[num_heads]` float32 logit of the sink, which takes probability and gives no value.
        scale: factor of `q . k`.
        accumulate: float32 or float64.
    Returns: `[num_rows, num_heads, head_dim]` bf16; zeros for a row without any valid key.
    """
    num_rows, num_heads, head_dim = q.shape
    # Selected, not multiplied: what lies in the place of a missing key may be anything, NaN included.
    values = keys.masked_fill(~is_valid.unsqueeze(-1), 0).to(accumulate)
    scores = torch.matmul(q.to(accumulate), values.transpose(1, 2)) * scale
    scores = scores.masked_fill(~is_valid.unsqueeze(1), -torch.inf)
    running_max = scores.new_full((num_rows, num_heads, 1), -1e30)
    total = scores.new_zeros((num_rows, num_heads, 1))
    out = scores.new_zeros((num_rows, num_heads, head_dim))
    for start in range(0, keys.shape[1], KEY_BLOCK):
        block, block_values = scores[:, :, start : start + KEY_BLOCK], values[:, start : start + KEY_BLOCK]
        new_max = torch.maximum(running_max, block.amax(dim=-1, keepdim=True))
        decay = torch.exp(running_max - new_max)
        p = torch.exp(block - new_max)
        total = total * decay + p.sum(dim=-1, keepdim=True)
        out = out * decay + torch.matmul(p.to(torch.bfloat16).to(accumulate), block_values)
        running_max = new_max
    total = total + torch.exp(sinks.to(accumulate).view(1, -1, 1) - running_max)
    return (out / total).to(torch.bfloat16)


def attention_row_bytes(num_heads: int, head_dim: int, num_keys: int, accumulate: torch.dtype) -> int:
    """Memory that `sparse_attention` needs for a row, its gathered keys included."""
    # Keys as found in cache and step, masked, and in `accumulate`; scores, their exponentials, and results.
    key_bytes = num_keys * head_dim * (4 * torch.bfloat16.itemsize + accumulate.itemsize)
    return key_bytes + 3 * num_heads * (num_keys + head_dim) * accumulate.itemsize
