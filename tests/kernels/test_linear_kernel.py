"""The kernels of dense products, of the shared expert's activation and of the expert choice, interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch

from kernels import activation, linear, router
from kernels.reference import activation as activation_reference
from kernels.reference import linear as linear_reference
from kernels.reference import router as router_reference
from kernels.reference.quantize import encode_fp8_tiles
from kernels.tensors import Fp8Matrix, Matrix
from tests.kernels.builders import assert_bit_equal, normal


def whole_numbers(*shape: int, seed: str) -> torch.Tensor:
    """Their sums are exact in float32, in any order."""
    return normal(*shape, seed=seed, std=3).round()


@pytest.mark.parametrize(("size_out", "size_in"), [(64, 256), (96, 288), (1088, 640)])
@pytest.mark.parametrize("num_rows", [1, 17, 70])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_products_of_whole_numbers_are_exact(
    size_out: int, size_in: int, num_rows: int, is_fp8: bool
) -> None:
    x = whole_numbers(num_rows, size_in + 16, seed="x")[:, :size_in]
    w: Matrix = whole_numbers(size_out, size_in, seed="w")
    if is_fp8:
        w = Fp8Matrix(*encode_fp8_tiles(w.float()))
    for options in ({}, {"out_dtype": torch.bfloat16}, {"quantize": True}):
        expected = linear_reference.linear(x, w, **options)
        assert_bit_equal(linear.linear(x, w, **options), expected)


def test_activation_has_nearly_the_values_of_the_reference() -> None:
    gate_up = normal(5, 2 * 288, std=6, dtype=torch.float32)
    actual, expected = activation.swiglu_q8(gate_up, 10.0), activation_reference.swiglu_q8(gate_up, 10.0)
    # Two exponentials that differ in their last bits seldom round to other codes.
    assert (actual != expected).float().mean() < 0.01


@pytest.mark.parametrize(("num_experts", "num_topk"), [(384, 6), (128, 3), (8, 3)])
def test_choices_are_those_of_the_reference(num_experts: int, num_topk: int) -> None:
    logits = normal(9, num_experts, dtype=torch.float32, std=8).round()  # with ties
    logits[4] = torch.nan
    bias = torch.zeros(num_experts)
    topk_idx, topk_weights = router.choose_experts(logits, bias, num_topk, 1.5)
    expected_idx, expected = router_reference.choose_experts(logits, bias, num_topk, 1.5)
    assert topk_idx.tolist() == expected_idx.tolist()
    assert torch.allclose(topk_weights, expected, rtol=2e-6, atol=0, equal_nan=True)
