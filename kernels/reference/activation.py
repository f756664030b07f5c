"""Sigmoid, SiLU and softplus whose value depends on the element alone.

On a CPU torch's own versions compute the elements that fill a vector register by one routine and those left over at the
end of a tensor by another, which differs in the last bit: a row's result would depend on the number of rows. `exp` and
`log1p` use one routine for all elements (tested in tests/kernels/test_activation.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

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
