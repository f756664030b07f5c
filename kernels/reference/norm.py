"""RMSNorm. Source: `spec/model.md` section 0."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, accumulate: torch.dtype) -> Tensor:
    """`x / sqrt(mean(x**2) + eps) * weight`, computed in `accumulate`, rounded once.

    Args:
        x: `[..., n]` bf16.
        weight: `[n]` bf16.
        eps: added to the mean square.
        accumulate: float32 or float64.
    Returns: `[..., n]` bf16.
    """
    values = x.to(accumulate)
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * scale * weight.to(accumulate)).to(torch.bfloat16)
