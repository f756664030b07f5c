"""Rotary position embedding on adjacent pairs, with YaRN frequencies. Source: `spec/model.md` section 4.1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN context extension: which frequencies are divided by `factor`."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int


def rope_frequencies(rope_dim: int, theta: float, yarn: Yarn | None, accumulate: torch.dtype) -> Tensor:
    """Angle per position of each rotated pair.

    Args:
        rope_dim: rotated dimensions, even.
        theta: base.
        yarn: None for plain RoPE.
        accumulate: float32 as the model defines it, or float64.
    Returns: `[rope_dim // 2]`, `accumulate`.
    """
    pair = torch.arange(0, rope_dim, 2, dtype=accumulate)
    frequencies = 1.0 / theta ** (pair / rope_dim)
    if yarn is None:
        return frequencies

    def correction(beta: float) -> float:
        return rope_dim * math.log(yarn.original_max_position / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), rope_dim - 1)
    ramp = ((torch.arange(rope_dim // 2, dtype=accumulate) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def apply_rope(x: Tensor, positions: Tensor, frequencies: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last `2 * len(frequencies)` dimensions of `x` by `position * frequency`.

    The angle is rounded to the dtype of `frequencies` (FP32 is visible near position 10^6, and meant).

    Args:
        x: `[num_rows, ..., n]` bf16; pairs are adjacent elements (2k, 2k + 1).
        positions: `[num_rows]` int64.
        frequencies: `[rope_dim // 2]` float32 or float64; the rotation is computed in this type.
        inverse: rotate by the negative angle.
    Returns: a new tensor like `x`, the rotated part rounded to bf16.
    """
    rope_dim = 2 * frequencies.shape[0]
    angle = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies  # [num_rows, rope_dim // 2]
    angle = angle.view(x.shape[0], *(1,) * (x.dim() - 2), rope_dim // 2)
    cos, sin = angle.cos(), angle.sin()
    if inverse:
        sin = -sin
    even, odd = x[..., -rope_dim:].to(frequencies.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], rotated.to(x.dtype)), dim=-1)
