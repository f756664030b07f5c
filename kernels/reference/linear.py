"""Matrix products with a stated accumulation type and row results that do not depend on the batch.

Source: `spec/model.md` section 0 (L8, L4, L16, L32). By the identity given there, L8 and L4 are plain products of the
fake-quantised activation and the dequantised weight, both exact in BF16; callers quantise `x` where the spec says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

CPU_ROW_TILE = 16
"""Rows of one CPU product. BLAS picks its kernel, and with it the order of additions, by the number of rows; a fixed
number makes a row's result independent of the rows beside it (tested in tests/kernels/test_linear.py)."""


def linear(x: Tensor, w: Tensor, accumulate: torch.dtype) -> Tensor:
    """`x @ w.T`, accumulated and returned in `accumulate`.

    Args:
        x: `[num_rows, in]`, bf16 or `accumulate`.
        w: `[out, in]`, bf16 or `accumulate`.
        accumulate: float32 or float64.
    Returns: `[num_rows, out]`, `accumulate`; row `i` depends on `x[i]` and `w` only.
    """
    x, w = x.to(accumulate), w.to(accumulate)
    if x.device.type != "cpu":
        return x @ w.T
    num_rows = x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, -num_rows % CPU_ROW_TILE))
    out = [tile @ w.T for tile in padded.split(CPU_ROW_TILE)]
    return torch.cat(out)[:num_rows] if out else x.new_zeros((0, w.shape[0]))


def linear_bf16(x: Tensor, w: Tensor, accumulate: torch.dtype) -> Tensor:
    """`linear` rounded once to BF16: `[num_rows, in]`, `[out, in]` to `[num_rows, out]` bf16."""
    return linear(x, w, accumulate).to(torch.bfloat16)
