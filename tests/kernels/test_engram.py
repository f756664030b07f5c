"""Engram injection (spec section 7.4)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference.engram import inject_engram
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

M, HIDDEN = 4, 64

accumulate_types = pytest.mark.parametrize("accumulate", ACCUMULATE)


def engram_inputs(num_tokens: int, hidden: int = HIDDEN) -> tuple[Tensor, ...]:
    """Stream, key, value, q_weight and k_weight."""
    return (
        normal(num_tokens, M, hidden, seed="stream", std=2),
        normal(num_tokens, M, hidden, seed="key"),
        normal(num_tokens, hidden, seed="value"),
        normal(M, hidden, seed="q", std=0.3) + 1,
        normal(M, hidden, seed="k", std=0.3) + 1,
    )


def inject(*inputs: Tensor, accumulate: torch.dtype = torch.float64) -> Tensor:
    stream, key, value, q_weight, k_weight = inputs
    projected = torch.cat((key.flatten(1), value), dim=1)
    return inject_engram(stream, projected, q_weight, k_weight, norm_eps=1e-20, accumulate=accumulate)


def naive(stream: Tensor, key: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor) -> Array:
    out = numpy(stream).copy()
    for token in range(stream.shape[0]):
        for c in range(M):
            x, k = numpy(stream)[token, c], numpy(key)[token, c]
            dot = (x * (numpy(q_weight)[c] * numpy(k_weight)[c]) * k).sum()
            dot /= math.sqrt((x**2).mean() + 1e-20) * math.sqrt((k**2).mean() + 1e-20) * math.sqrt(len(x))
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)))
            out[token, c] = x + gate * numpy(value)[token]
    return out


def test_every_copy_receives_the_value_by_its_own_gate() -> None:
    inputs = engram_inputs(12)
    expected = naive(*inputs)
    assert_within_bf16_ulps(inject(*inputs), expected, num_ulps=0)
    # Sums that nearly cancel show an FP32 step as several of their own.
    assert_within_bf16_ulps(inject(*inputs, accumulate=torch.float32), expected, num_ulps=4, share=0.01)


def gates(stream: Tensor, key: Tensor) -> list[float]:
    """The gate of each copy, read off a value that is large beside the stream."""
    num_tokens, m, hidden = stream.shape
    value = torch.full((num_tokens, hidden), 2.0**40, dtype=torch.bfloat16)
    one = torch.ones(m, hidden, dtype=torch.bfloat16)
    return (inject(stream, key, value, one, one)[0, :, 0].double() / 2.0**40).tolist()


def test_the_gate_is_the_sigmoid_of_a_signed_square_root() -> None:
    x = torch.ones(1, 3, HIDDEN, dtype=torch.bfloat16)
    key = torch.ones(1, 3, HIDDEN, dtype=torch.bfloat16)
    key[0, 1] *= -1
    key[0, 2, ::2] *= -1  # orthogonal
    root = HIDDEN**0.25  # of a cosine of one, times the root of the size
    expected = [1 / (1 + math.exp(-root)), 1 / (1 + math.exp(root)), 1 / (1 + math.exp(-1e-3))]
    assert gates(x, key) == pytest.approx(expected, rel=2**-8)


def test_the_gate_does_not_see_the_size_of_stream_and_key() -> None:
    stream, key, *_ = engram_inputs(1)
    assert gates(stream * 64, key / 32) == gates(stream, key)


def test_a_zero_stream_or_key_opens_the_gate_by_half() -> None:
    zero = torch.zeros(1, M, HIDDEN, dtype=torch.bfloat16)
    ones = torch.ones_like(zero)
    assert gates(zero, ones) == pytest.approx([0.5] * M, rel=2**-8)
    assert gates(ones, zero) == pytest.approx([0.5] * M, rel=2**-8)


def test_weights_count_in_the_product_and_not_in_the_norms() -> None:
    stream, key, value, _, _ = engram_inputs(3)
    ones = torch.ones(M, HIDDEN, dtype=torch.bfloat16)
    doubled = inject(stream, key, value, 2 * ones, 2 * ones)
    # Four times the product; had the weights been inside the norms, nothing would change.
    assert_within_bf16_ulps(doubled, naive(stream, key, value, 4 * ones, ones), num_ulps=0)
    assert not torch.equal(doubled, inject(stream, key, value, ones, ones))


@accumulate_types
@pytest.mark.parametrize("hidden", [HIDDEN, 256, 1280])
def test_a_row_does_not_depend_on_the_rows_beside_it(accumulate: torch.dtype, hidden: int) -> None:
    stream, key, value, q_weight, k_weight = engram_inputs(NUM_ROWS, hidden)
    projected = torch.cat((key, value.unsqueeze(1)), dim=1)  # one product gives both, and their strides
    assert_rows_are_independent(
        lambda rows, both: inject(rows, both[:, :M], both[:, M], q_weight, k_weight, accumulate=accumulate),
        *(stream, projected),
        spoil=[0, 1],
    )


@accumulate_types
def test_inputs_may_have_any_strides_and_no_rows(accumulate: torch.dtype) -> None:
    inputs = engram_inputs(5)
    expected = inject(*inputs, accumulate=accumulate)
    projected = torch.cat((inputs[1], inputs[2].unsqueeze(1)), dim=1)
    views = (inputs[0], projected[:, :M], projected[:, M], *inputs[3:])
    assert_bit_equal(inject(*views, accumulate=accumulate), expected)
    loose = inject(*(strided(x) for x in inputs), accumulate=accumulate)
    assert np.abs(numpy(loose) - numpy(expected)).max() <= 2**-7 * np.abs(numpy(expected)).max()
    empty = inject(*engram_inputs(0), accumulate=accumulate)
    assert empty.shape == (0, M, HIDDEN)
