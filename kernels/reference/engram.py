"""Engram injection: gate a looked-up value into every residual copy. Source: `spec/model.md` section 7.4."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.activation import sigmoid


def inject_engram(
    stream: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    norm_eps: float,
    accumulate: torch.dtype,
) -> Tensor:
    """`stream[c] + sigmoid(signed_sqrt(<stream[c], key[c]>)) * value` with both sides RMS-normalised per copy.

    Args:
        stream: `[num_tokens, m, hidden]` bf16.
        key: `[num_tokens, m, hidden]` bf16.
        value: `[num_tokens, hidden]` bf16.
        q_weight: `[m, hidden]` bf16; inside the product, not inside the norms.
        k_weight: same.
        norm_eps: RMS epsilon.
        accumulate: float32 or float64.
    Returns: `[num_tokens, m, hidden]` bf16.
    """
    x, k = stream.to(accumulate), key.to(accumulate)
    weight = q_weight.to(accumulate) * k_weight.to(accumulate)
    dot = (x * weight * k).sum(dim=-1)  # [num_tokens, m]
    dot = (
        dot
        * torch.rsqrt(x.square().mean(dim=-1) + norm_eps)
        * torch.rsqrt(k.square().mean(dim=-1) + norm_eps)
    )
    dot = dot * stream.shape[-1] ** -0.5
    gate = sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return (x + gate.unsqueeze(-1) * value.to(accumulate).unsqueeze(1)).to(torch.bfloat16)
