"""Products (spec section 0): the formula, the block-scaled form it equals, one rounding, and rows that stand alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.reference.linear import linear, linear_bf16
from kernels.reference.quantize import decode_ue8m0, dequantize_fp8_tiles, encode_fp8_tiles, quantize_q8
from tests.kernels.builders import (
    ACCUMULATE,
    NUM_ROWS,
    assert_bit_equal,
    assert_rows_are_independent,
    assert_within_bf16_ulps,
    normal,
    numpy,
    strided,
)

SHAPES = [(256, 64), (64, 256), (1024, 24), (128, 256), (288, 1), (256, 3), (512, 8)]
"""Pairs of in and out, the out sizes of a vector, of mixes and of few experts among them."""

accumulate_types = pytest.mark.parametrize("accumulate", ACCUMULATE)


@accumulate_types
@pytest.mark.parametrize(("size_in", "size_out"), SHAPES)
def test_products_are_sums_in_the_accumulation_type(
    accumulate: torch.dtype, size_in: int, size_out: int
) -> None:
    x, w = normal(5, size_in), normal(size_out, size_in, seed="w")
    out = linear(x, w, accumulate)
    expected = np.array([[sum(a * b) for b in numpy(w)] for a in numpy(x)])
    magnitude = np.abs(numpy(x)) @ np.abs(numpy(w)).T
    # Worst case of a sum in any order: one rounding per addition.
    assert out.dtype == accumulate
    assert (np.abs(numpy(out) - expected) <= size_in * torch.finfo(accumulate).eps * magnitude).all()


@accumulate_types
def test_whole_numbers_are_summed_exactly(accumulate: torch.dtype) -> None:
    x, w = normal(37, 64, std=4).round(), normal(24, 64, seed="w", std=4).round()
    assert_bit_equal(linear(x, w, accumulate), (x.long() @ w.long().T).to(accumulate))


def test_float64_sums_reach_bf16_through_float32() -> None:
    # 1 + 2**-8 is the middle between two BF16 values; what lies above it is lost in FP32, and the tie goes to even.
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    w = torch.tensor([[1, 2.0**-8, 2.0**-40], [1, 2.0**-8, 2.0**-20]], dtype=torch.bfloat16)
    assert linear_bf16(x, w, torch.float64).tolist() == [[1, 1 + 2.0**-7]]


def test_block_scaled_accumulation_is_the_product_of_dequantised_values() -> None:
    """The order that section 0 gives for L8 differs from a plain product by a rounding of the output at most."""
    x, w = normal(6, 256), normal(64, 256, seed="w", dtype=torch.float32, std=0.06)
    quantised = numpy(quantize_q8(x)).astype(np.float32)
    codes, scales = encode_fp8_tiles(w)
    weight, weight_scales = numpy(codes.float()).astype(np.float32), numpy(decode_ue8m0(scales))
    expected = np.zeros((6, 64), np.float32)
    for block in range(256 // 32):
        columns = slice(32 * block, 32 * block + 32)
        for row in range(6):
            # The scale of the activation is a power of two: it may stay in the quantised values.
            partial = weight[:, columns] @ quantised[row, columns]
            expected[row] += partial * weight_scales[np.arange(64) // 32, block].astype(np.float32)
    out = linear_bf16(quantize_q8(x), dequantize_fp8_tiles(codes, scales), torch.float32)
    assert_within_bf16_ulps(out, expected, num_ulps=1, share=0.01)


@accumulate_types
@pytest.mark.parametrize(("size_in", "size_out"), SHAPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    accumulate: torch.dtype, size_in: int, size_out: int
) -> None:
    w = normal(size_out, size_in, seed="w")
    for dtype in (torch.bfloat16, accumulate):
        x = normal(NUM_ROWS, size_in, dtype=dtype)
        assert_rows_are_independent(lambda rows: linear(rows, w, accumulate), x, spoil=[0])


@accumulate_types
@pytest.mark.parametrize(("size_in", "size_out"), SHAPES)
def test_inputs_may_have_any_strides(accumulate: torch.dtype, size_in: int, size_out: int) -> None:
    x, w = normal(32, size_in), normal(size_out, size_in, seed="w")
    expected = linear(x, w, accumulate)
    for dtype in (torch.bfloat16, accumulate):
        assert_bit_equal(linear(strided(x.to(dtype)), w, accumulate), expected)
        assert_bit_equal(linear(x.to(dtype).T.contiguous().T, w, accumulate), expected)
        beside = torch.cat((x, x), dim=1).to(dtype)
        assert_bit_equal(linear(beside[:, size_in:], w, accumulate), expected)


@accumulate_types
def test_no_rows_give_no_rows(accumulate: torch.dtype) -> None:
    out = linear(normal(0, 64), normal(24, 64), accumulate)
    assert (out.shape, out.dtype) == ((0, 24), accumulate)
