"""RMSNorm (spec section 0)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference.norm import rms_norm
from tests.kernels.builders import (
    ACCUMULATE,
    NUM_ROWS,
    Array,
    assert_bit_equal,
    assert_rows_are_independent,
    assert_within_bf16_ulps,
    normal,
    numpy,
    strided,
)

EPS = 1e-20

accumulate_types = pytest.mark.parametrize("accumulate", ACCUMULATE)


def formula(x: Tensor, weight: Tensor) -> Array:
    rows = numpy(x)
    return np.stack([row / np.sqrt(sum(row * row) / len(row) + EPS) * numpy(weight) for row in rows])


@pytest.mark.parametrize("size", [32, 100, 256, 1280])
def test_values_follow_the_formula_and_are_rounded_once(size: int) -> None:
    x, weight = normal(50, size, std=3), normal(size, seed="weight")
    assert_within_bf16_ulps(rms_norm(x, weight, EPS, torch.float64), formula(x, weight), num_ulps=0)
    assert_within_bf16_ulps(
        rms_norm(x, weight, EPS, torch.float32), formula(x, weight), num_ulps=1, share=0.001
    )


@accumulate_types
def test_epsilon_is_far_below_the_usual_one(accumulate: torch.dtype) -> None:
    x = torch.full((1, 64), 1e-10, dtype=torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16)
    # The mean square equals epsilon, nearly: the root of two remains.
    assert_within_bf16_ulps(rms_norm(x, weight, EPS, accumulate), formula(x, weight), num_ulps=0)
    assert rms_norm(x, weight, EPS, accumulate)[0, 0].item() == pytest.approx(2**-0.5, rel=0.01)


@accumulate_types
def test_a_zero_row_stays_zero(accumulate: torch.dtype) -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert_bit_equal(rms_norm(x, normal(64).abs(), EPS, accumulate), x)


@accumulate_types
def test_axes_before_the_last_are_rows(accumulate: torch.dtype) -> None:
    x, weight = normal(3, 5, 64), normal(64, seed="weight")
    flat = rms_norm(x.flatten(0, 1), weight, EPS, accumulate)
    assert_bit_equal(rms_norm(x, weight, EPS, accumulate), flat.view(3, 5, 64))


@accumulate_types
@pytest.mark.parametrize("size", [64, 100, 256, 1280])
def test_a_row_does_not_depend_on_the_rows_beside_it(accumulate: torch.dtype, size: int) -> None:
    weight = normal(size, seed="weight")
    x = normal(NUM_ROWS, size)
    assert_rows_are_independent(lambda rows: rms_norm(rows, weight, EPS, accumulate), x, spoil=[0])


@accumulate_types
def test_inputs_may_have_any_strides(accumulate: torch.dtype) -> None:
    x, weight = normal(20, 64), normal(64, seed="weight")
    expected = rms_norm(x, weight, EPS, accumulate)
    assert_bit_equal(rms_norm(strided(x), strided(weight), EPS, accumulate), expected)


@accumulate_types
def test_no_rows_give_no_rows(accumulate: torch.dtype) -> None:
    assert rms_norm(normal(0, 64), normal(64), EPS, accumulate).shape == (0, 64)
