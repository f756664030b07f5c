"""Sigmoid, SiLU, softplus and SwiGLU whose value depends on the element alone.

On a CPU torch's own versions compute the elements that fill a vector register by one routine and those left over at the
end of a tensor by another, which differs in the last bit: a row's result would depend on the number of rows. `exp` and
`log1p` use one routine for all elements (tested in tests/kernels/test_activation.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.quantize import quantize_q8

SOFTPLUS_THRESHOLD = 20.0
"""Above it softplus is the identity, as in torch."""


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))`, in the dtype of `x`."""
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`, in the dtype of `x`."""
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))`, in the dtype of `x`."""
    return torch.where(x > SOFTPLUS_THRESHOLD, x, torch.log1p(torch.exp(x)))


def swiglu(gate: Tensor, up: Tensor, limit: float, accumulate: torch.dtype) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`: bf16 in, `accumulate` out; the gate has no lower limit."""
    g = gate.to(accumulate).clamp_max(limit)
    u = up.to(accumulate).clamp(-limit, limit)
    return silu(g) * u


def swiglu_q8(gate_up: Tensor, limit: float, *, accumulate: torch.dtype) -> Tensor:
    """What the shared expert's down product takes.

    Args:
        gate_up: `[num_rows, 2 * inter]`, gate columns first; rounded to bf16 first if it is not.
        limit: clamp of gate and up.
        accumulate: float32 or float64.
    Returns: `[num_rows, inter]` bf16 in Q8.
    """
    gate, up = gate_up.to(torch.bfloat16).chunk(2, dim=1)
    return quantize_q8(swiglu(gate, up, limit, accumulate).to(torch.bfloat16))
