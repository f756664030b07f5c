"""What becomes of a layer's low-rank projection: query input and window keys. Source: `spec/model.md` section 4.2."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.norm import rms_norm
from kernels.reference.quantize import pack_q8, quantize_q8
from kernels.reference.rope import apply_rope
from kernels.tensors import QuantizedRows


def split_low_rank(
    projected: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    *,
    norm_eps: float,
    accumulate: torch.dtype,
) -> tuple[Tensor, QuantizedRows]:
    """Normalise both halves; quantise the query's, rotate and pack the key.

    Args:
        projected: `[num_rows, q_lora_rank + head_dim]` in `accumulate`; each half is rounded to bf16 first.
        q_norm: `[q_lora_rank]` bf16.
        kv_norm: `[head_dim]` bf16.
        positions: `[num_rows]` int64; -1 for a padding row.
        frequencies: `[rope_dim // 2]` in `accumulate`.
        norm_eps: RMS epsilon.
        accumulate: float32 or float64.
    Returns: `[num_rows, q_lora_rank]` bf16 in Q8, and `[num_rows, head_dim]` keys in Q8.
    """
    low_rank, key = projected.to(torch.bfloat16).split((q_norm.shape[0], kv_norm.shape[0]), dim=1)
    low_rank = rms_norm(low_rank, q_norm, norm_eps, accumulate)
    key = apply_rope(rms_norm(key, kv_norm, norm_eps, accumulate), positions, frequencies)
    return quantize_q8(low_rank), pack_q8(key)
