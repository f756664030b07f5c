"""Groups of tensors that kernels and references share: packed rows, FP8 matrices, where a step's rows and keys lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class QuantizedRows(NamedTuple):
    """Rows of codes with their scales, under one index.

    | holds | codes | scales |
    | --- | --- | --- |
    | window keys (Q8) | `[num_rows, n]` float8_e4m3fn | `[num_rows, n // 32]` uint8 (ue8m0) |
    | compressed entries (Q4n) | `[num_rows, n // 2]` uint8, low nibble first | `[num_rows, n // 16]` float8_e4m3fn |
    | index keys (Q4u) | `[num_rows, n // 2]` uint8, low nibble first | `[num_rows, n // 32]` uint8 (ue8m0) |
    """

    codes: Tensor
    scales: Tensor


class Fp8Matrix(NamedTuple):
    """A dense FP8 weight with a power-of-two scale per 32x32 tile; every value is exact in BF16."""

    codes: Tensor
    """`[out, in]` float8_e4m3fn."""
    scales: Tensor
    """`[out // 32, in // 32]` uint8 (ue8m0)."""


Matrix: TypeAlias = Tensor | Fp8Matrix
"""`[out, in]`: float32, float64 or bf16, or FP8 codes with their scales."""


def stack(matrices: Sequence[Matrix]) -> Matrix:
    """Matrices of one kind, below each other; rows of FP8 ones in multiples of 32."""
    if all(isinstance(w, Fp8Matrix) for w in matrices):
        # Bytes, since not every torch concatenates FP8.
        codes = torch.cat([w.codes.view(torch.uint8) for w in matrices if isinstance(w, Fp8Matrix)])
        scales = torch.cat([w.scales for w in matrices if isinstance(w, Fp8Matrix)])
        return Fp8Matrix(codes.view(torch.float8_e4m3fn), scales)
    return torch.cat([w for w in matrices if isinstance(w, Tensor)])


class Mixes(NamedTuple):
    """Per-token coefficients over the `m` residual copies, in the accumulation type."""

    pre: Tensor
    """`[num_tokens, m]`: weights that collapse the copies into a sub-layer's input (used one sub-layer later)."""
    post: Tensor
    """`[num_tokens, m]`: how much of the sub-layer's output each copy receives."""
    comb: Tensor
    """`[num_tokens, m, m]`: doubly stochastic mixing; copy `b` receives `comb[a, b]` of copy `a`."""


class Advanced(NamedTuple):
    """The residual stream at the next sub-layer, and what that sub-layer sees."""

    stream: Tensor
    """`[num_rows, m, hidden]` bf16."""
    mixes: Mixes
    """Of `stream`."""
    x: Tensor
    """`[num_rows, hidden]` bf16: collapsed and normalised."""
    x_q8: Tensor
    """`[num_rows, hidden]` bf16: `x` in Q8."""


class QueryRows(NamedTuple):
    """Rows of a step that a layer evaluates."""

    positions: Tensor
    """`[num_rows]` int64; -1 for a padding row, which reads no key and writes no cache."""
    sequence: Tensor
    """`[num_rows]` int64: index of the row's sequence in the step; of a padding row any valid one."""


class WindowPlaces(NamedTuple):
    """Where the window keys of each sequence lie: `[num_sequences]` int64 each.

    The key of position `p` does not exist before `floor`, is in row `p + new_offset` of the keys that this step
    computes from `first_new` on, and else in row `ring_start + p % ring` of the layer's ring.
    """

    ring_start: Tensor
    first_new: Tensor
    new_offset: Tensor
    floor: Tensor
