"""Expert choice (spec section 6)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference.router import route
from tests.kernels.builders import (
    ACCUMULATE,
    NUM_ROWS,
    assert_bit_equal,
    assert_rows_are_independent,
    normal,
    numpy,
    strided,
)

HIDDEN = 64

accumulate_types = pytest.mark.parametrize("accumulate", ACCUMULATE)


def gate_of(*logits: float) -> Tensor:
    """A gate that gives these logits for `ONE`."""
    gate = torch.zeros(len(logits), HIDDEN, dtype=torch.bfloat16)
    gate[:, 0] = torch.tensor(logits)
    return gate


ONE = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
ONE[0, 0] = 1


def picks(gate: Tensor, bias: list[float] | None = None, num_topk: int = 3) -> list[int]:
    bias_tensor = torch.tensor(bias) if bias else torch.zeros(len(gate))
    return route(ONE, gate, bias_tensor, num_topk, 1.5, torch.float32)[0][0].tolist()


@accumulate_types
@pytest.mark.parametrize(("num_experts", "num_topk"), [(8, 3), (4, 2), (48, 6), (8, 8)])
def test_choices_and_weights_follow_the_formula(
    accumulate: torch.dtype, num_experts: int, num_topk: int
) -> None:
    x, gate = normal(40, HIDDEN, std=4), normal(num_experts, HIDDEN, seed="gate", std=0.4)
    bias = normal(num_experts, seed="bias", dtype=torch.float32, std=0.5)
    topk_idx, topk_weights = route(x, gate, bias, num_topk, 1.5, accumulate)
    logits = numpy(x) @ numpy(gate).T
    assert (logits > 20).any(), "no logit is in the linear part"
    for token in range(40):
        scores = [math.sqrt(z if z > 20 else math.log1p(math.exp(z))) for z in logits[token]]
        order = sorted(range(num_experts), key=lambda e: (-(scores[e] + bias[e].item()), e))
        chosen = sorted(order[:num_topk])
        assert topk_idx[token].tolist() == chosen
        weights = np.array([scores[e] for e in chosen])  # without the bias
        expected = weights / (weights.sum() + 1e-20) * 1.5
        tolerance = (
            1e3 * torch.finfo(accumulate).eps
        )  # logits of several tens, their roundings in the exponent
        assert topk_weights[token].tolist() == pytest.approx(expected, rel=tolerance)
    assert (topk_idx.dtype, topk_weights.dtype) == (torch.int64, accumulate)


def test_experts_come_in_ascending_order() -> None:
    assert picks(gate_of(0, 1, 2, 3, 4, 5)) == [3, 4, 5]
    assert picks(gate_of(5, 0, 4, 0, 3, 0)) == [0, 2, 4]


def test_ties_go_to_the_lower_expert() -> None:
    assert picks(gate_of(0.5, 0.5, 0.5, 0.5, 0.5)) == [0, 1, 2]
    assert picks(gate_of(0, 1, 0, 1, 1, 1)) == [1, 3, 4]
    # All scores are zero, though the logits differ.
    assert picks(gate_of(-900, -800, -1000, -700, -800)) == [0, 1, 2]


def test_the_bias_selects_and_does_not_weigh() -> None:
    gate = gate_of(1, 2, 3, 4)
    bias = torch.tensor([50.0, 0.0, 0.0, -50.0])
    topk_idx, topk_weights = route(ONE, gate, bias, 2, 1.5, torch.float64)
    assert topk_idx.tolist() == [[0, 2]]
    scores = [math.sqrt(math.log1p(math.exp(z))) for z in (1, 3)]
    assert topk_weights[0].tolist() == pytest.approx([1.5 * s / sum(scores) for s in scores], rel=1e-12)


def test_ties_that_the_bias_makes_go_to_the_lower_expert() -> None:
    assert picks(gate_of(-1000, -1000, -1000, -1000), bias=[0.25, 0.5, 0.5, 0.5], num_topk=2) == [1, 2]


@accumulate_types
def test_weights_add_up_to_the_scaling_factor(accumulate: torch.dtype) -> None:
    x, gate = normal(40, HIDDEN), normal(8, HIDDEN, seed="gate")
    _, weights = route(x, gate, torch.zeros(8), 3, 1.5, accumulate)
    assert weights.sum(dim=-1).tolist() == pytest.approx([1.5] * 40, rel=4 * torch.finfo(accumulate).eps)


@accumulate_types
def test_scores_of_zero_give_weights_of_zero(accumulate: torch.dtype) -> None:
    _, weights = route(ONE, gate_of(-1000, -2000, -3000), torch.zeros(3), 2, 1.5, accumulate)
    assert weights.tolist() == [[0, 0]]


@accumulate_types
@pytest.mark.parametrize(("num_experts", "num_topk"), [(8, 3), (4, 2), (48, 6)])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    accumulate: torch.dtype, num_experts: int, num_topk: int
) -> None:
    gate = normal(num_experts, HIDDEN, seed="gate", std=0.3)
    bias = normal(num_experts, seed="bias", dtype=torch.float32, std=0.1)
    assert_rows_are_independent(
        lambda x: route(x, gate, bias, num_topk, 1.5, accumulate), normal(NUM_ROWS, HIDDEN), spoil=[0]
    )


@accumulate_types
def test_inputs_may_have_any_strides_and_no_rows(accumulate: torch.dtype) -> None:
    x, gate = normal(5, HIDDEN), normal(8, HIDDEN, seed="gate")
    expected = route(x, gate, torch.zeros(8), 3, 1.5, accumulate)
    actual = route(strided(x), gate, torch.zeros(8), 3, 1.5, accumulate)
    assert_bit_equal(actual[0], expected[0])
    assert_bit_equal(actual[1], expected[1])
    topk_idx, weights = route(x[:0], gate, torch.zeros(8), 3, 1.5, accumulate)
    assert (topk_idx.shape, weights.shape) == ((0, 3), (0, 3))
