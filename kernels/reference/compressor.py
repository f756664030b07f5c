"""Pairwise pooling of the ratio-2 compressor. Source: `spec/model.md` section 4.3."""

from __future__ import annotations

import torch
from torch import Tensor


def pool_pairs(values: Tensor, gates: Tensor) -> Tensor:
    """Softmax-weighted mean of two tokens, channel by channel.

    Args:
        values: `[num_groups, 2, n]` float32 or float64, oldest token first.
        gates: same shape and dtype, logits.
    Returns: `[num_groups, n]` bf16.
    """
    return (torch.softmax(gates, dim=1) * values).sum(dim=1).to(torch.bfloat16)
