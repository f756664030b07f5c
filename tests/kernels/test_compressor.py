"""Pairwise pooling (spec section 4.3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.reference.compressor import pool_pairs
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

accumulate_types = pytest.mark.parametrize("accumulate", ACCUMULATE)


@accumulate_types
def test_every_channel_is_weighted_by_its_own_softmax(accumulate: torch.dtype) -> None:
    values, gates = (
        normal(9, 2, 37, dtype=accumulate),
        normal(9, 2, 37, seed="gates", dtype=accumulate, std=3),
    )
    a, g = numpy(values), np.exp(numpy(gates))
    expected = (a[:, 0] * g[:, 0] + a[:, 1] * g[:, 1]) / (g[:, 0] + g[:, 1])
    assert_within_bf16_ulps(pool_pairs(values, gates), expected, num_ulps=1, share=0.01)


@accumulate_types
def test_equal_gates_give_the_mean(accumulate: torch.dtype) -> None:
    values = normal(3, 2, 64, dtype=accumulate)
    gates = normal(3, 1, 64, seed="gates", dtype=accumulate).expand(-1, 2, -1)
    assert_bit_equal(pool_pairs(values, gates), values.mean(dim=1).to(torch.bfloat16))


@accumulate_types
def test_a_far_larger_gate_takes_its_token_alone(accumulate: torch.dtype) -> None:
    values = normal(1, 2, 64, dtype=accumulate)
    gates = torch.zeros(1, 2, 64, dtype=accumulate)
    gates[:, 0, :32], gates[:, 1, 32:] = 2000, 2000
    expected = torch.cat((values[:, 0, :32], values[:, 1, 32:]), dim=1)
    assert_bit_equal(pool_pairs(values, gates), expected.to(torch.bfloat16))


@accumulate_types
@pytest.mark.parametrize("size", [64, 512, 37])
def test_a_pair_does_not_depend_on_the_pairs_beside_it(accumulate: torch.dtype, size: int) -> None:
    values = normal(NUM_ROWS, 2, size, dtype=accumulate)
    gates = normal(NUM_ROWS, 2, size, seed="gates", dtype=accumulate, std=3)
    assert_rows_are_independent(pool_pairs, values, gates, spoil=[0, 1])


@accumulate_types
def test_inputs_may_have_any_strides_and_no_pairs(accumulate: torch.dtype) -> None:
    values = normal(5, 2, 64, dtype=accumulate)
    gates = normal(5, 2, 64, seed="gates", dtype=accumulate)
    assert_bit_equal(pool_pairs(strided(values), strided(gates)), pool_pairs(values, gates))
    both = torch.stack((values, gates), dim=2)  # the two halves of a state, side by side
    assert_bit_equal(pool_pairs(both[:, :, 0], both[:, :, 1]), pool_pairs(values, gates))
    assert pool_pairs(values[:0], gates[:0]).shape == (0, 64)
