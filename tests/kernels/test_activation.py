"""Sigmoid, SiLU and softplus (spec sections 3, 6, 7.4): their formulas, and the same bits wherever a value stands."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.reference.activation import sigmoid, silu, softplus
from tests.kernels.builders import ACCUMULATE, assert_bit_equal, normal, strided

FORMULAS: dict[Callable[[Tensor], Tensor], Callable[[float], float]] = {
    sigmoid: lambda x: 1 / (1 + math.exp(-x)),
    silu: lambda x: x / (1 + math.exp(-x)),
    softplus: lambda x: x if x > 20 else math.log1p(math.exp(x)),
}
NUM_ULPS = 4
"""Roundings of a formula: the exponential, the addition, the logarithm or division."""

functions = pytest.mark.parametrize("function", FORMULAS)
accumulate_types = pytest.mark.parametrize("accumulate", ACCUMULATE)


@functions
@accumulate_types
def test_values_follow_the_formula(function: Callable[[Tensor], Tensor], accumulate: torch.dtype) -> None:
    x = normal(1000, dtype=accumulate, std=8.0)
    expected = torch.tensor([FORMULAS[function](v) for v in x.tolist()], dtype=torch.float64)
    tolerance = NUM_ULPS * torch.finfo(accumulate).eps
    assert torch.allclose(function(x).double(), expected, rtol=tolerance, atol=0)


@functions
@accumulate_types
def test_a_value_does_not_depend_on_its_place_in_the_tensor(
    function: Callable[[Tensor], Tensor], accumulate: torch.dtype
) -> None:
    x = normal(640, dtype=accumulate, std=3.0)
    whole = function(x)
    for start in range(100):
        for end in (start + 1, start + 7, 500, 640 - start):
            assert_bit_equal(function(x[start:end]), whole[start:end])
    assert_bit_equal(function(strided(x.view(20, 32))), whole.view(20, 32))


@accumulate_types
def test_far_arguments_reach_the_limits(accumulate: torch.dtype) -> None:
    x = torch.tensor([-1e4, -1000.0, 1000.0, 1e4], dtype=accumulate)
    assert sigmoid(x).tolist() == [0, 0, 1, 1]
    assert silu(x).tolist() == [0, 0, 1000, 1e4]
    assert softplus(x).tolist() == [0, 0, 1000, 1e4]


@accumulate_types
def test_softplus_is_the_identity_above_twenty_only(accumulate: torch.dtype) -> None:
    above = torch.nextafter(torch.tensor(20.0, dtype=accumulate), torch.tensor(21.0, dtype=accumulate))
    assert softplus(above) == above
    assert softplus(torch.tensor(20.0, dtype=torch.float64)).item() == math.log1p(math.exp(20.0)) > 20
