"""Matrix products with a stated accumulation type and row results that do not depend on the batch.

Source: `spec/model.md` section 0 (L8, L4, L16, L32). By the identity given there, L8 and L4 are plain products of the
fake-quantised activation and the dequantised weight, both exact in BF16; callers quantise `x` where the spec says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.quantize import dequantize_fp8_tiles, quantize_q8
from kernels.tensors import Fp8Matrix, Matrix


def linear(
    x: Tensor,
    w: Matrix,
    accumulate: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
    quantize: bool = False,
) -> Tensor:
    """`x @ w.T`.

    Args:
        x: `[num_rows, in]`, bf16 or `accumulate`.
        w: `[out, in]`.
        accumulate: float32 or float64.
        out_dtype: bf16 to round the result once; None leaves it in `accumulate`.
        quantize: round to bf16, then to Q8.
    Returns: `[num_rows, out]`, `accumulate` or bf16; row `i` depends on `x[i]` and `w` only.
    """
    if isinstance(w, Fp8Matrix):
        w = dequantize_fp8_tiles(*w)
    product = _multiply(x.to(accumulate), w.to(accumulate))
    if quantize:
        return quantize_q8(product.to(torch.bfloat16))
    return product if out_dtype is None else product.to(out_dtype)


def _multiply(x: Tensor, w: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return x @ w.T
    # One product per row: BLAS chooses its kernel, and with it the order of additions, by the number of rows, and some
    # kernels add in an order that depends on the row's place.
    rows = x.contiguous().unsqueeze(1)  # [num_rows, 1, in]
    return torch.bmm(rows, w.T.expand(x.shape[0], -1, -1)).squeeze(1)


def linear_bf16(x: Tensor, w: Matrix, accumulate: torch.dtype) -> Tensor:
    """`linear` rounded once to BF16: `[num_rows, in]`, `[out, in]` to `[num_rows, out]` bf16."""
    return linear(x, w, accumulate, out_dtype=torch.bfloat16)
