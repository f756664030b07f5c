"""Inputs and comparisons of the kernel tests."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.floating]

ACCUMULATE = (torch.float32, torch.float64)
NUM_ROWS = 100
"""Rows of the batch that `assert_rows_are_independent` cuts up."""


def generator(seed: object) -> torch.Generator:
    """A random generator for anything that prints: the name of a case is a good seed."""
    return torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))


def normal(*shape: int, seed: object = 0, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
    """Random normal numbers; the shape is part of the seed."""
    values = torch.randn(*shape, generator=generator((seed, shape)), dtype=torch.float64)
    return (values * std).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The values of `x` in memory that is contiguous along no axis."""
    wide = x.new_zeros(*(2 * size for size in reversed(x.shape)))
    view = wide[tuple(slice(None, None, 2) for _ in x.shape)].permute(*reversed(range(x.dim())))
    view.copy_(x)
    return view


def bf16(x: Array) -> Array:
    """Finite values rounded to FP32 and then to BF16, both to nearest even, as float64."""
    bits = np.asarray(x).astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def numpy(x: Tensor) -> Array:
    """The same values as float64."""
    values: Array = x.to(torch.float64).numpy()
    return values


_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bit_equal(actual: Tensor, expected: Tensor) -> None:
    """Same dtype, shape and bytes; names the first coordinate that differs."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    integer = _SAME_SIZE_INTEGER[actual.element_size()]
    differs = actual.contiguous().view(integer) != expected.contiguous().view(integer)
    if differs.any():
        first = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(differs.sum())} of {differs.numel()} values differ, the first at {first}: "
            f"{actual[first].item()!r} instead of {expected[first].item()!r}"
        )


def assert_within_bf16_ulps(actual: Tensor, expected: Array, num_ulps: float, share: float = 1.0) -> None:
    """`actual` is BF16 and at most `num_ulps` BF16 steps from `expected`, at most a `share` of it off at all."""
    assert actual.dtype == torch.bfloat16, f"{actual.dtype=}"
    rounded = bf16(expected)
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(rounded), 2.0**-126))) - 7)
    off = np.abs(numpy(actual) - rounded) / step
    assert off.max(initial=0) <= num_ulps, (
        f"{off.max()} steps away at {np.unravel_index(off.argmax(), off.shape)}"
    )
    assert (off > 0).mean() <= share, f"{(off > 0).mean():.2%} of the values differ"


def assert_rows_are_independent(
    function: Callable[..., Tensor | tuple[Tensor, ...]], *batched: Tensor, spoil: Sequence[int] = ()
) -> None:
    """A row's result has the same bits in every batch: whatever rows are beside it, wherever it stands.

    Args:
        function: of the batched tensors; returns one or several tensors with a row per row.
        batched: `[NUM_ROWS, ...]` each.
        spoil: which of them hold NaN in all other rows, once.
    """

    def rows(idx: Tensor | slice) -> tuple[Tensor, ...]:
        result = function(*(x[idx] for x in batched))
        return result if isinstance(result, tuple) else (result,)

    whole = rows(slice(None))
    starts = torch.randint(0, NUM_ROWS, (NUM_ROWS,), generator=generator("starts")).tolist()
    for num_rows, start in enumerate(starts, start=1):
        begin = min(start, NUM_ROWS - num_rows)
        part = slice(begin, begin + num_rows)
        for actual, expected in zip(rows(part), whole, strict=True):
            assert_bit_equal(actual, expected[part])
    for row in range(NUM_ROWS):
        for actual, expected in zip(rows(slice(row, row + 1)), whole, strict=True):
            assert_bit_equal(actual, expected[row : row + 1])
    order = torch.randperm(NUM_ROWS, generator=generator("order"))
    for actual, expected in zip(rows(order), whole, strict=True):
        assert_bit_equal(actual, expected[order])
    if spoil:
        for row in (0, 7, NUM_ROWS - 1):
            spoilt = list(batched)
            for index in spoil:
                spoilt[index] = torch.full_like(batched[index], torch.nan)
                spoilt[index][row] = batched[index][row]
            result = function(*spoilt)
            for actual, expected in zip(
                result if isinstance(result, tuple) else (result,), whole, strict=True
            ):
                assert_bit_equal(actual[row], expected[row])
