"""Rotary embedding and YaRN (spec section 4.1, golden numbers of appendix A)."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import Tensor

from kernels.reference.rope import Yarn, apply_rope, rope_frequencies
from tests.kernels.builders import (
    ACCUMULATE,
    NUM_ROWS,
    assert_bit_equal,
    assert_rows_are_independent,
    normal,
    strided,
)

RELEASED_YARN = Yarn(factor=16, beta_fast=32, beta_slow=1, original_max_position=65536)
TINY_YARN = Yarn(factor=4, beta_fast=32, beta_slow=1, original_max_position=32)

ROUNDING = 1.01 * 2**-8
"""By how much of its length a vector moves when it is rounded to BF16, and a little for the second roundings."""

accumulate_types = pytest.mark.parametrize("accumulate", ACCUMULATE)


def released_frequencies(accumulate: torch.dtype = torch.float32) -> Tensor:
    return rope_frequencies(64, 160000, RELEASED_YARN, accumulate)


def rotate(
    x: Tensor, positions: list[int], frequencies: Tensor | None = None, *, inverse: bool = False
) -> Tensor:
    """`apply_rope`, by default with the frequencies of a tiny layer (16 rotated dimensions) in FP64."""
    if frequencies is None:
        frequencies = rope_frequencies(16, 10000, None, torch.float64)
    return apply_rope(x, torch.tensor(positions, dtype=torch.int64), frequencies, inverse=inverse)


def pairs(x: Tensor) -> Tensor:
    return x.double().view(*x.shape[:-1], -1, 2)


def pair_lengths(x: Tensor) -> Tensor:
    return pairs(x).square().sum(dim=-1, keepdim=True).sqrt()


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        (0, 1),
        (1, 0.687656045),
        (14, 0.00528685655),
        (15, 0.00363553851),
        (16, 0.00226562493),
        (20, 0.000296977785),
        (24, 1.95312532e-05),
        (25, 5.37231244e-06),
        (31, 5.6805294e-07),
    ],
)
def test_yarn_frequencies_are_the_golden_ones(pair: int, expected: float) -> None:
    # Printed with nine digits; one FP32 rounding is 6e-8, and a frequency takes several.
    assert released_frequencies()[pair].item() == pytest.approx(expected, rel=2e-7)
    assert released_frequencies(torch.float64)[pair].item() == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize(
    ("pair", "angle"), [(1, 687656.0625), (15, 3635.53857421875), (20, 296.977783203125)]
)
def test_angles_are_rounded_to_float32_at_position_1000000(pair: int, angle: float) -> None:
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 2 * pair] = 1
    rotated = rotate(x, [1_000_000], released_frequencies())
    expected = torch.tensor([math.cos(angle), math.sin(angle)]).to(torch.bfloat16)
    assert_bit_equal(rotated[0, 2 * pair : 2 * pair + 2], expected)


def test_the_float32_angle_is_visible_at_position_1000000() -> None:
    exact = 1_000_000 * released_frequencies(torch.float64)[1].item()
    assert abs(exact - 687656.0625) > 0.01
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 2] = 1
    rotated = rotate(x, [1_000_000], released_frequencies(torch.float64))
    expected = torch.tensor([math.cos(exact), math.sin(exact)]).to(torch.bfloat16)
    assert_bit_equal(rotated[0, 2:4], expected)
    assert not torch.equal(rotated, rotate(x, [1_000_000], released_frequencies()))


@accumulate_types
def test_plain_frequencies_are_powers_of_theta(accumulate: torch.dtype) -> None:
    frequencies = rope_frequencies(64, 10000, None, accumulate)
    assert frequencies.dtype == accumulate
    expected = [10000 ** (-2 * k / 64) for k in range(32)]
    # A power rounds its exponent (up to ln 10000 in size) and its result.
    assert frequencies.tolist() == pytest.approx(expected, rel=10 * torch.finfo(accumulate).eps)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones_by_the_factor() -> None:
    plain = rope_frequencies(16, 160000, None, torch.float64)
    scaled = rope_frequencies(16, 160000, TINY_YARN, torch.float64)
    # Spec section 13: low 0 and high 2, so the ramp is 0, 1/2, 1, 1, ...
    expected = [plain[0], (plain[1] + plain[1] / 4) / 2, *(plain[2:] / 4)]
    assert scaled.tolist() == pytest.approx([float(f) for f in expected], rel=1e-15)


def test_pairs_are_adjacent_elements_of_the_last_dimensions() -> None:
    x = normal(5, 40)
    positions = [0, 1, 7, 100, 255]
    rotated = rotate(x, positions)
    frequencies = rope_frequencies(16, 10000, None, torch.float64).tolist()
    expected = x.double()
    for row, position in enumerate(positions):
        for pair, frequency in enumerate(frequencies):
            at = 24 + 2 * pair
            turned = complex(*x[row, at : at + 2].tolist()) * cmath.exp(1j * position * frequency)
            expected[row, at : at + 2] = torch.tensor([turned.real, turned.imag], dtype=torch.float64)
    assert_bit_equal(rotated, expected.to(torch.bfloat16))


@accumulate_types
def test_position_zero_and_the_unrotated_dimensions_stay_as_they_are(accumulate: torch.dtype) -> None:
    x = normal(3, 2, 40)
    frequencies = rope_frequencies(16, 10000, None, accumulate)
    rotated = rotate(x, [0, 3, 9], frequencies)
    assert_bit_equal(rotated[0], x[0])
    assert_bit_equal(rotated[..., :24], x[..., :24])
    assert not torch.equal(rotated[1:, :, 24:], x[1:, :, 24:])


def test_every_head_of_a_row_turns_by_the_position_of_the_row() -> None:
    x = normal(4, 3, 16)
    rotated = rotate(x, [5, 0, 77, 5])
    for head in range(3):
        assert_bit_equal(rotated[:, head], rotate(x[:, head], [5, 0, 77, 5]))


@accumulate_types
def test_the_inverse_undoes_a_rotation_but_for_the_rounding(accumulate: torch.dtype) -> None:
    x = normal(50, 16)
    positions = list(range(0, 5000, 100))
    frequencies = rope_frequencies(16, 10000, None, accumulate)
    back = rotate(rotate(x, positions, frequencies), positions, frequencies, inverse=True)
    assert (pairs(back - x).abs() <= 2 * ROUNDING * pair_lengths(x)).all()
    mirrored = rotate(x, [-p for p in positions], frequencies)
    assert_bit_equal(rotate(x, positions, frequencies, inverse=True), mirrored)


def test_products_of_rotated_vectors_see_the_distance_only() -> None:
    q, k = normal(2, 16)
    near = (rotate(q[None], [40]).double() * rotate(k[None], [33]).double()).sum()
    far = (rotate(q[None], [4007]).double() * rotate(k[None], [4000]).double()).sum()
    bound = 4 * ROUNDING * q.double().norm() * k.double().norm()
    assert abs(near - far) <= bound
    assert abs(near - (q.double() * k.double()).sum()) > bound


def test_two_half_turns_make_a_whole_one() -> None:
    x = normal(20, 16)
    half, whole = list(range(0, 400, 20)), list(range(0, 800, 40))
    difference = rotate(rotate(x, half), half).double() - rotate(x, whole).double()
    assert (pairs(difference).abs() <= 3 * ROUNDING * pair_lengths(x)).all()


@accumulate_types
def test_a_row_does_not_depend_on_the_rows_beside_it(accumulate: torch.dtype) -> None:
    frequencies = rope_frequencies(16, 160000, TINY_YARN, accumulate)
    x, positions = normal(NUM_ROWS, 4, 64), torch.arange(NUM_ROWS) * 7919
    assert_rows_are_independent(lambda rows, at: apply_rope(rows, at, frequencies), x, positions, spoil=[0])


@accumulate_types
def test_inputs_may_have_any_strides_and_no_rows(accumulate: torch.dtype) -> None:
    frequencies = rope_frequencies(16, 10000, None, accumulate)
    x = normal(3, 2, 40)
    assert_bit_equal(rotate(strided(x), [4, 5, 6], frequencies), rotate(x, [4, 5, 6], frequencies))
    assert rotate(x[:0], [], frequencies).shape == (0, 2, 40)
    assert rotate(x[:0, 0], [], frequencies).shape == (0, 40)
