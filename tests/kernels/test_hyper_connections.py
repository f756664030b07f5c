"""Hyper-connections (spec section 3, golden numbers of appendix A)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference.hyper_connections import Mixes, collapse, compute_mixes, expand, sinkhorn
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


def mixes(
    stream: Tensor, fn: Tensor, base: Tensor, scale: Tensor, accumulate: torch.dtype = torch.float64
) -> Mixes:
    return compute_mixes(
        stream,
        fn,
        base,
        scale,
        sinkhorn_iters=20,
        hc_eps=1e-6,
        norm_eps=1e-20,
        accumulate=accumulate,
    )


def weights(hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    """`fn`, `base` and `scale`, of the size that the tiny checkpoint has."""
    size = M * hidden
    fn = normal(2 * M + M * M, size, seed="fn", dtype=torch.float32, std=size**-0.5)
    base = normal(2 * M + M * M, seed="base", dtype=torch.float32, std=0.5)
    return fn, base, normal(3, seed="scale", dtype=torch.float32, std=0.5)


def random_mixes(num_tokens: int, accumulate: torch.dtype) -> Mixes:
    pre, post = (normal(num_tokens, M, seed=name, dtype=accumulate) for name in ("pre", "post"))
    return Mixes(pre, post, normal(num_tokens, M, M, seed="comb", dtype=accumulate))


def sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


def naive_sinkhorn(logits: Array) -> Array:
    c: Array = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) + 1e-6
    c = c / (c.sum(axis=0, keepdims=True) + 1e-6)
    for _ in range(19):
        c = c / (c.sum(axis=1, keepdims=True) + 1e-6)
        c = c / (c.sum(axis=0, keepdims=True) + 1e-6)
    return c


def test_mixes_have_the_golden_values() -> None:
    golden = np.array([0.3 * ((7 * n) % 11 - 5) for n in range(24)])
    base = torch.tensor([0.1 * ((5 * n) % 7 - 3) for n in range(24)], dtype=torch.float32)
    # A stream of ones has a root mean square of one, so the rows of `fn` may hold the wanted mix.
    stream = torch.ones(1, M, HIDDEN, dtype=torch.bfloat16)
    fn = torch.zeros(24, M * HIDDEN)
    fn[:, 5] = torch.from_numpy(golden)
    actual = mixes(stream, fn, base, torch.tensor([0.5, 0.25, 1.0]))
    half_digit = 6e-7  # six digits, and `fn` and `base` are FP32
    assert actual.pre[0].tolist() == pytest.approx([0.259226, 0.622460, 0.425559, 0.634137], abs=half_digit)
    assert actual.post[0].tolist() == pytest.approx([1.185333, 0.937581, 1.099668, 0.851115], abs=half_digit)
    expected = [
        [0.147196, 0.497719, 0.207888, 0.147196],
        [0.282722, 0.035260, 0.399296, 0.282721],
        [0.121575, 0.411084, 0.345766, 0.121575],
        [0.448507, 0.055936, 0.047049, 0.448507],
    ]
    assert numpy(actual.comb[0]) == pytest.approx(np.array(expected), abs=half_digit)


@accumulate_types
def test_mixes_follow_the_formula(accumulate: torch.dtype) -> None:
    stream, (fn, base, scale) = normal(7, M, HIDDEN, std=3), weights()
    actual = mixes(stream, fn, base, scale, accumulate)
    tolerance = 1e3 * torch.finfo(accumulate).eps  # sums of 256 and 20 normalisations
    for token in range(7):
        v = numpy(stream[token]).reshape(-1)  # copy-major
        m = (numpy(fn) @ v) / np.sqrt((v**2).mean() + 1e-20)
        s, b = numpy(scale), numpy(base)
        assert numpy(actual.pre[token]) == pytest.approx(sigmoid(m[:4] * s[0] + b[:4]) + 1e-6, rel=tolerance)
        assert numpy(actual.post[token]) == pytest.approx(2 * sigmoid(m[4:8] * s[1] + b[4:8]), rel=tolerance)
        logits = (m[8:] * s[2] + b[8:]).reshape(4, 4)  # row a, column b
        assert numpy(actual.comb[token]) == pytest.approx(naive_sinkhorn(logits), rel=tolerance)
    assert {actual.pre.dtype, actual.post.dtype, actual.comb.dtype} == {accumulate}


@accumulate_types
def test_pre_has_a_floor_and_post_has_none(accumulate: torch.dtype) -> None:
    fn, _, scale = weights()
    base = torch.full((24,), -1000.0)
    actual = mixes(torch.zeros(1, M, HIDDEN, dtype=torch.bfloat16), fn, base, scale, accumulate)
    assert actual.pre[0].tolist() == pytest.approx([1e-6] * 4, rel=1e-6)
    assert actual.post[0].tolist() == [0] * 4


def test_sinkhorn_balances_rows_and_columns() -> None:
    comb = sinkhorn(normal(30, M, M, dtype=torch.float64), 20, 1e-6)
    assert (comb > 0).all()
    # Columns come last; epsilon in each denominator keeps sums a little below one.
    assert numpy(comb.sum(dim=-2)) == pytest.approx(np.ones((30, M)), abs=2e-6)
    assert numpy(comb.sum(dim=-1)) == pytest.approx(np.ones((30, M)), abs=1e-3)


def test_one_sinkhorn_iteration_is_a_softmax_of_rows_and_a_column_step() -> None:
    logits = normal(M, M, dtype=torch.float64)
    c = np.exp(numpy(logits))
    c = c / c.sum(axis=1, keepdims=True) + 0.01
    c = c / (c.sum(axis=0, keepdims=True) + 0.01)
    assert numpy(sinkhorn(logits, 1, 0.01)) == pytest.approx(c, rel=1e-14)


@accumulate_types
def test_collapse_is_the_weighted_sum_of_copies(accumulate: torch.dtype) -> None:
    stream, pre = normal(9, M, HIDDEN), normal(9, M, seed="pre", dtype=accumulate)
    products = [numpy(pre)[:, c, None] * numpy(stream)[:, c] for c in range(M)]
    assert_within_bf16_ulps(collapse(stream, pre), np.sum(products, axis=0), num_ulps=1, share=0.01)


@accumulate_types
def test_the_identity_mix_collapses_to_the_first_copy(accumulate: torch.dtype) -> None:
    stream = normal(9, M, HIDDEN)
    pre = torch.tensor([[1, 0, 0, 0]], dtype=accumulate).expand(9, M)
    assert_bit_equal(collapse(stream, pre), stream[:, 0].contiguous())


@accumulate_types
def test_expand_sums_over_the_first_index_of_comb(accumulate: torch.dtype) -> None:
    y, stream, mix = normal(9, HIDDEN, seed="y"), normal(9, M, HIDDEN), random_mixes(9, accumulate)
    expected = np.empty((9, M, HIDDEN))
    for b in range(M):
        mixed = sum(numpy(mix.comb)[:, a, b, None] * numpy(stream)[:, a] for a in range(M))
        expected[:, b] = numpy(mix.post)[:, b, None] * numpy(y) + mixed
    # A step of FP32 in front of the rounding; sums that nearly cancel show it as several steps of their own.
    assert_within_bf16_ulps(expand(y, stream, mix), expected, num_ulps=2, share=0.01)


def test_one_entry_of_comb_moves_one_copy_to_another() -> None:
    stream, y = normal(1, M, HIDDEN), normal(1, HIDDEN, seed="y")
    comb, post = torch.zeros(1, M, M), torch.zeros(1, M)
    comb[0, 2, 1] = 1  # copy 1 receives copy 2
    post[0, 3] = 1  # copy 3 receives the sub-layer's output
    out = expand(y, stream, Mixes(post, post, comb))
    assert_bit_equal(out[0, 1], stream[0, 2])
    assert_bit_equal(out[0, 3], y[0])
    assert not out[0, [0, 2]].any()


@accumulate_types
@pytest.mark.parametrize("hidden", [HIDDEN, 256])
def test_a_row_of_mixes_does_not_depend_on_the_rows_beside_it(accumulate: torch.dtype, hidden: int) -> None:
    fn, base, scale = weights(hidden)

    def run(stream: Tensor) -> tuple[Tensor, ...]:
        result = mixes(stream, fn, base, scale, accumulate)
        return result.pre, result.post, result.comb

    assert_rows_are_independent(run, normal(NUM_ROWS, M, hidden), spoil=[0])
    logits = normal(NUM_ROWS, M, M, dtype=accumulate)
    assert_rows_are_independent(lambda rows: sinkhorn(rows, 20, 1e-6), logits, spoil=[0])


@accumulate_types
@pytest.mark.parametrize("hidden", [HIDDEN, 256])
def test_a_row_of_the_stream_does_not_depend_on_the_rows_beside_it(
    accumulate: torch.dtype, hidden: int
) -> None:
    y, stream, mix = normal(NUM_ROWS, hidden), normal(NUM_ROWS, M, hidden), random_mixes(NUM_ROWS, accumulate)
    assert_rows_are_independent(collapse, stream, mix.pre, spoil=[0, 1])
    assert_rows_are_independent(
        lambda y, stream, post, comb: expand(y, stream, Mixes(post, post, comb)),
        *(y, stream, mix.post, mix.comb),
        spoil=[0, 1, 2, 3],
    )


@accumulate_types
def test_inputs_may_have_any_strides(accumulate: torch.dtype) -> None:
    y, stream, mix = normal(9, HIDDEN), normal(9, M, HIDDEN), random_mixes(9, accumulate)
    loose = Mixes(strided(mix.pre), strided(mix.post), strided(mix.comb))
    assert_bit_equal(collapse(strided(stream), loose.pre), collapse(stream, mix.pre))
    assert_bit_equal(expand(strided(y), strided(stream), loose), expand(y, stream, mix))
    fn, base, scale = weights()
    tight, actual = (mixes(x, fn, base, scale, accumulate) for x in (stream, strided(stream)))
    assert_bit_equal(actual.comb, tight.comb)
    assert_bit_equal(actual.pre, tight.pre)


@accumulate_types
def test_no_rows_give_no_rows(accumulate: torch.dtype) -> None:
    stream, mix = normal(0, M, HIDDEN), mixes(normal(0, M, HIDDEN), *weights(), accumulate)
    assert (mix.pre.shape, mix.post.shape, mix.comb.shape) == ((0, M), (0, M), (0, M, M))
    assert collapse(stream, mix.pre).shape == (0, HIDDEN)
    assert expand(normal(0, HIDDEN), stream, mix).shape == (0, M, HIDDEN)
