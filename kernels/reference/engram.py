"""Engram: look up table rows, gate a value into every residual copy. Source: `spec/model.md` sections 7.3, 7.4."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.activation import sigmoid
from kernels.reference.quantize import dequantize_fp8_rows, quantize_q8


def gather_rows(row_ids: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Look-ups of every token, side by side.

    Args:
        row_ids: `[num_tokens, num_columns]` int64, rows of the table; -1 for a token that looks nothing up.
        codes: `[table_rows, head_dim]` float8_e4m3fn, on the CPU.
        scales: `[table_rows, head_dim // 32]` uint8 (ue8m0), on the CPU.
    Returns: `[num_tokens, num_columns * head_dim]` bf16 in Q8, where `row_ids` is; zeros for -1.
    """
    rows = row_ids.cpu()
    found = dequantize_fp8_rows(codes[rows.clamp_min(0)], scales[rows.clamp_min(0)])
    found = found.masked_fill((rows < 0).unsqueeze(-1), 0).to(torch.bfloat16)
    return quantize_q8(found.flatten(1)).to(row_ids.device)


def inject_engram(
    stream: Tensor,
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    norm_eps: float,
    accumulate: torch.dtype,
) -> Tensor:
    """`stream[c] + sigmoid(signed_sqrt(<stream[c], key[c]>)) * value` with both sides RMS-normalised per copy.

    Args:
        stream: `[num_tokens, m, hidden]` bf16.
        projected: `[num_tokens, (m + 1) * hidden]`: a key for each copy, then the value; rounded to bf16 first.
        q_weight: `[m, hidden]` bf16; inside the product, not inside the norms.
        k_weight: same.
        norm_eps: RMS epsilon.
        accumulate: float32 or float64.
    Returns: `[num_tokens, m, hidden]` bf16.
    """
    projected = projected.to(torch.bfloat16).to(accumulate).unflatten(1, (-1, stream.shape[-1]))
    x, k, value = stream.to(accumulate), projected[:, :-1], projected[:, -1]
    weight = q_weight.to(accumulate) * k_weight.to(accumulate)
    dot = (x * weight * k).sum(dim=-1)  # [num_tokens, m]
    dot = (
        dot
        * torch.rsqrt(x.square().mean(dim=-1) + norm_eps)
        * torch.rsqrt(k.square().mean(dim=-1) + norm_eps)
    )
    dot = dot * stream.shape[-1] ** -0.5
    gate = sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return (x + gate.unsqueeze(-1) * value.unsqueeze(1)).to(torch.bfloat16)
