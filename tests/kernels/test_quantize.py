"""Quantisers and packing (spec sections 0 and 2.2, golden numbers of appendix A)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference.quantize import (
    decode_e2m1,
    decode_ue8m0,
    dequantize_fp8_rows,
    dequantize_fp8_tiles,
    dequantize_mxfp4,
    encode_e2m1,
    encode_fp8_rows,
    encode_fp8_tiles,
    encode_mxfp4,
    encode_ue8m0,
    pack_nibbles,
    pack_q4n,
    pack_q4u,
    pack_q8,
    pow2ceil,
    quantize_q4n,
    quantize_q4u,
    quantize_q8,
    unpack_nibbles,
    unpack_q4n,
    unpack_q4u,
    unpack_q8,
)
from kernels.tensors import QuantizedRows
from tests.kernels.builders import assert_bit_equal, normal, numpy, strided

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
E4M3 = [(code % 8 * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10)) for code in range(127)]
"""Values of the codes 0 .. 126; 127 is NaN, and 128 more carry the sign."""

Quantiser = Callable[[Tensor], Tensor]
quantisers = pytest.mark.parametrize("quantiser", [quantize_q8, quantize_q4u, quantize_q4n])


def golden_row() -> Tensor:
    """The row of appendix A."""
    x = (torch.arange(32, dtype=torch.float64) * 0.37 - 5.1).to(torch.bfloat16)
    assert (x[0].item(), x[31].item()) == (-5.09375, 6.375)
    return x


def nearest(x: float, values: list[float]) -> float:
    """The value of the nearest code of an ascending table of magnitudes, ties to the even code, saturating; signed."""
    magnitude = min(abs(x), values[-1])
    code = min(range(len(values)), key=lambda c: (abs(values[c] - magnitude), c % 2))
    return math.copysign(values[code], x)


def naive_pow2ceil(amax: float, reciprocal_of: float) -> float:
    t = float(np.float32(amax) * np.float32(1 / reciprocal_of))
    return 2.0 ** math.ceil(math.log2(t)) if math.log2(t) % 1 else t


def naive_q8(group: list[float]) -> list[float]:
    scale = naive_pow2ceil(max(*map(abs, group), 1e-4), 448)
    return [nearest(x / scale, E4M3) * scale for x in group]


def naive_q4u(group: list[float]) -> list[float]:
    scale = naive_pow2ceil(max(*map(abs, group), 6 * 2.0**-126), 6)
    return [nearest(x / scale, E2M1[:8]) * scale for x in group]


def naive_q4n(group: list[float]) -> list[float]:
    amax = max(*map(abs, group), 6 * 2.0**-9)
    scale = nearest(float(np.float32(amax) / np.float32(6)), E4M3)
    return [nearest(float(np.float32(x) / np.float32(scale)), E2M1[:8]) * scale for x in group]


NAIVE: dict[Quantiser, tuple[Callable[[list[float]], list[float]], int]] = {
    quantize_q8: (naive_q8, 32),
    quantize_q4u: (naive_q4u, 32),
    quantize_q4n: (naive_q4n, 16),
}


def test_all_sixteen_e2m1_codes_have_their_values() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert_bit_equal(decode_e2m1(codes), torch.tensor(E2M1, dtype=torch.float32))
    assert_bit_equal(encode_e2m1(decode_e2m1(codes)), codes)


def test_ties_between_e2m1_values_go_to_the_even_code() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    rounded = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert_bit_equal(decode_e2m1(encode_e2m1(middles)), rounded)
    assert_bit_equal(decode_e2m1(encode_e2m1(-middles)), -rounded)
    # A hair away from the middle there is no tie.
    below = torch.nextafter(middles, torch.zeros(7))
    above = torch.nextafter(middles, torch.full((7,), 9.0))
    assert_bit_equal(decode_e2m1(encode_e2m1(below)), torch.tensor(E2M1[:7], dtype=torch.float32))
    assert_bit_equal(decode_e2m1(encode_e2m1(above)), torch.tensor(E2M1[1:8], dtype=torch.float32))


def test_e2m1_rounds_to_the_nearest_value_and_saturates() -> None:
    x = torch.cat((torch.arange(-800, 801) / 100, torch.tensor([1e30, -1e30, torch.inf, -torch.inf])))
    expected = [nearest(v, E2M1[:8]) for v in x.tolist()]
    assert_bit_equal(decode_e2m1(encode_e2m1(x)), torch.tensor(expected, dtype=torch.float32))


def test_all_256_ue8m0_scales_have_their_values() -> None:
    values = decode_ue8m0(torch.arange(256, dtype=torch.uint8))
    expected = [2.0 ** (code - 127) for code in range(255)]
    assert values[:255].tolist() == expected
    assert values[0].item() == 2.0**-127 > 0
    assert values[255].isnan()
    assert encode_ue8m0(values[1:255]).tolist() == list(range(1, 255))


def test_the_low_nibble_comes_first() -> None:
    assert unpack_nibbles(torch.tensor([[0x21, 0x43]], dtype=torch.uint8)).tolist() == [[1, 2, 3, 4]]
    all_bytes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    assert_bit_equal(pack_nibbles(unpack_nibbles(all_bytes)), all_bytes)
    assert_bit_equal(pack_nibbles(strided(unpack_nibbles(all_bytes))), all_bytes)


@pytest.mark.parametrize(
    ("reciprocal_of", "amax", "expected"),
    [
        (448, 1e-4, 2.0**-22),
        (448, 1, 2.0**-8),
        (448, 3.5, 2.0**-7),
        (448, 448, 1),
        (448, 448.1, 2),
        (6, 0.75, 1 / 8),
        (6, 1, 1 / 4),
        (6, 3, 1 / 2),
        (6, 3.01, 1),
        (6, 6, 1),
        (6, 6.01, 2),
    ],
)
def test_pow2ceil_has_the_golden_values(reciprocal_of: float, amax: float, expected: float) -> None:
    assert pow2ceil(torch.tensor([amax]), reciprocal_of).item() == expected


@pytest.mark.parametrize("largest", [448, 6])
def test_pow2ceil_is_exact_at_the_largest_value_times_any_power_of_two(largest: float) -> None:
    powers = 2.0 ** torch.arange(-120, 110, dtype=torch.float32)
    assert_bit_equal(pow2ceil(largest * powers, largest), powers)
    above = torch.nextafter(largest * powers, torch.tensor(torch.inf))
    # An FP32 product rounds: a value just above may still give the power itself, the next BF16 value may not.
    assert (pow2ceil(above, largest) >= powers).all()
    assert_bit_equal(pow2ceil(largest * powers * (1 + 2.0**-7), largest), 2 * powers)


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_pow2ceil_of_every_bf16_value_is_the_smallest_power_that_reaches_the_product(largest: float) -> None:
    amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).to(torch.float32)
    amax = amax[amax >= largest * 2.0**-126]
    t = numpy(amax).astype(np.float32) * np.float32(1 / largest)
    power = numpy(pow2ceil(amax, largest)).astype(np.float32)
    assert (np.frexp(power)[0] == 0.5).all()
    assert (power >= t).all()
    assert (power / 2 < t).all()


def test_q8_has_the_golden_values() -> None:
    values = quantize_q8(golden_row()).tolist()
    assert values[:8] == [-5, -4.5, -4.5, -4, -3.5, -3.25, -3, -2.5]
    assert values[-4:] == [5, 5.5, 6, 6.5]
    assert decode_ue8m0(encode_fp8_rows(golden_row().float())[1]).tolist() == [2.0**-6]


def test_q4u_has_the_golden_values() -> None:
    expected = [-6, -4, -4, -4, -4, -3, -3, -3, -2, -2, -1, -1, -1, -0.0, 0, 0]
    expected += [1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 6, 6, 6, 6]
    assert_bit_equal(quantize_q4u(golden_row()), torch.tensor(expected, dtype=torch.bfloat16))
    codes, scales = encode_mxfp4(golden_row().float())
    assert decode_ue8m0(scales).tolist() == [2]
    assert_bit_equal(dequantize_mxfp4(codes, scales), torch.tensor(expected, dtype=torch.float32))


def test_q4n_has_the_golden_values() -> None:
    first = [-5.25, -5.25, -3.5, -3.5, -3.5, -3.5, -2.625, -2.625]
    first += [-1.75, -1.75, -1.3125, -0.875, -0.875, -0.4375, 0, 0.4375]
    second = [1, 1, 1.5, 2, 2, 3, 3, 3, 4, 4, 4, 4, 6, 6, 6, 6]
    assert quantize_q4n(golden_row()).tolist() == first + second


@quantisers
@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 0.01, 1.0, 100.0, 1e4])
def test_quantisers_follow_their_definition_group_by_group(quantiser: Quantiser, magnitude: float) -> None:
    naive, size = NAIVE[quantiser]
    x = normal(6, 96, seed=magnitude, std=magnitude)
    x[1] = 0
    x[2, ::5] *= 50
    x[3] *= torch.logspace(-6, 0, 96)
    groups = [row[start : start + size] for row in x.tolist() for start in range(0, 96, size)]
    expected = torch.tensor([naive(group) for group in groups], dtype=torch.float64).view(6, 96)
    # Exact in BF16: nothing is lost on the way.
    assert_bit_equal(quantiser(x).double(), expected)


@pytest.mark.parametrize("quantiser", [quantize_q8, quantize_q4u])
def test_a_quantised_value_is_a_fixed_point_of_power_of_two_scales(quantiser: Quantiser) -> None:
    quantised = quantiser(normal(20, 64, std=3))
    assert_bit_equal(quantiser(quantised), quantised)


@quantisers
def test_quantisers_take_any_strides_and_leading_axes(quantiser: Quantiser) -> None:
    x = normal(4, 3, 64)
    expected = quantiser(x.flatten(0, 1)).view(4, 3, 64)
    assert_bit_equal(quantiser(x), expected)
    assert_bit_equal(quantiser(strided(x)), expected)
    assert_bit_equal(quantiser(x[:, 1]), expected[:, 1])
    assert quantiser(x[:0]).shape == (0, 3, 64)


@quantisers
def test_nan_fills_its_own_group_and_no_other(quantiser: Quantiser) -> None:
    size = NAIVE[quantiser][1]
    x = normal(2, 96)
    expected = quantiser(x)
    x[1, size + 3] = torch.nan
    quantised = quantiser(x)
    hit = slice(size, 2 * size)
    assert quantised[1, hit].isnan().all()
    quantised[1, hit] = expected[1, hit]
    assert_bit_equal(quantised, expected)


def test_mxfp4_of_every_code_and_scale_is_their_product() -> None:
    codes = pack_nibbles(torch.arange(16, dtype=torch.uint8).repeat(256, 2))
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    expected = [[value * 2.0 ** (scale - 127) for value in E2M1 * 2] for scale in range(255)]
    actual = dequantize_mxfp4(codes, scales)
    assert actual[255].isnan().all()
    # The last two scales carry values past the largest FP32 number.
    assert_bit_equal(actual[:255], torch.tensor(expected, dtype=torch.float64).to(torch.float32))


def test_mxfp4_scales_cover_32_columns_of_one_row() -> None:
    codes = torch.full((3, 48), 0x22, dtype=torch.uint8)  # all ones
    scales = torch.tensor([[127, 128, 129], [130, 131, 132], [133, 134, 135]], dtype=torch.uint8)
    expected = torch.tensor([2.0**n for n in range(9)]).view(3, 3).repeat_interleave(32, dim=1)
    assert_bit_equal(dequantize_mxfp4(codes, scales), expected)
    assert_bit_equal(dequantize_mxfp4(strided(codes), strided(scales)), expected)
    assert dequantize_mxfp4(codes[:0], scales[:0]).shape == (0, 96)


def test_mxfp4_of_what_was_encoded_is_its_q4u() -> None:
    x = normal(9, 128, std=0.06)
    assert_bit_equal(dequantize_mxfp4(*encode_mxfp4(x.float())), quantize_q4u(x).float())


def test_fp8_tiles_have_one_scale_per_32_rows_and_columns() -> None:
    w = normal(64, 96, dtype=torch.float32, std=0.06)
    w[:32, 32:64] *= 1000
    w[32:, 64:] = 0
    codes, scales = encode_fp8_tiles(w)
    values = dequantize_fp8_tiles(codes, scales)
    assert (codes.shape, scales.shape) == ((64, 96), (2, 3))
    for row, column in itertools.product(range(2), range(3)):
        tile = slice(32 * row, 32 * row + 32), slice(32 * column, 32 * column + 32)
        scale = naive_pow2ceil(max(w[tile].abs().max().item(), 1e-4), 448)
        assert decode_ue8m0(scales)[row, column].item() == scale
        expected = [[nearest(x / scale, E4M3) * scale for x in line] for line in w[tile].tolist()]
        assert_bit_equal(values[tile].double(), torch.tensor(expected, dtype=torch.float64))


def test_fp8_rows_have_one_scale_per_32_columns() -> None:
    x = normal(5, 96, dtype=torch.float32)
    x[1, 32:64] = 0
    codes, scales = encode_fp8_rows(x)
    expected = [naive_q8(row[start : start + 32]) for row in x.tolist() for start in (0, 32, 64)]
    values = dequantize_fp8_rows(codes, scales)
    assert scales.shape == (5, 3)
    assert_bit_equal(values.double(), torch.tensor(expected, dtype=torch.float64).view(5, 96))
    assert_bit_equal(dequantize_fp8_rows(codes[[3, 1]], scales[[3, 1]]), values[[3, 1]])
    assert dequantize_fp8_rows(codes[:0], scales[:0]).shape == (0, 96)


def test_all_e4m3_codes_have_their_values() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 32)
    values = dequantize_fp8_rows(codes, torch.full((8, 1), 128, dtype=torch.uint8)).flatten()
    expected = torch.tensor([*E4M3, torch.nan, *(-value for value in E4M3), torch.nan]) * 2
    assert values.isnan().nonzero().flatten().tolist() == [127, 255]
    assert_bit_equal(values.nan_to_num(), expected.nan_to_num())


Pack = Callable[[Tensor], QuantizedRows]
Unpack = Callable[[QuantizedRows], Tensor]
packings = pytest.mark.parametrize(
    ("pack", "unpack", "quantiser", "group"),
    [
        (pack_q8, unpack_q8, quantize_q8, 32),
        (pack_q4u, unpack_q4u, quantize_q4u, 32),
        (pack_q4n, unpack_q4n, quantize_q4n, 16),
    ],
)


@packings
@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 1e-6, 1.0, 1e4, 1e37])
def test_packed_rows_hold_what_the_quantiser_returns(
    pack: Pack, unpack: Unpack, quantiser: Quantiser, group: int, magnitude: float
) -> None:
    x = normal(2, 5, 96, seed=magnitude, std=magnitude)
    rows = pack(x)
    assert_bit_equal(unpack(rows), quantiser(x))
    assert_bit_equal(unpack(pack(strided(x))), quantiser(x))
    assert rows.scales.shape == (2, 5, 96 // group)
    assert_bit_equal(unpack(QuantizedRows(*(strided(part) for part in rows))), quantiser(x))


def test_packed_rows_have_the_sizes_of_the_cache_formats() -> None:
    x = normal(3, 512)
    sizes = [sum(part[0].nbytes for part in pack(x)) for pack in (pack_q8, pack_q4n)]
    assert sizes == [528, 288]
    assert sum(part[0].nbytes for part in pack_q4u(x[:, :128])) == 68


@packings
def test_a_packed_nan_is_its_whole_group(
    pack: Pack, unpack: Unpack, quantiser: Quantiser, group: int
) -> None:
    x = normal(4, 96)
    x[1, 50] = torch.nan
    values = unpack(pack(x))
    assert values[1, 50 // group * group :][:group].isnan().all()
    assert values.isnan().sum() == group
    keep = ~values.isnan()
    assert_bit_equal(values[keep], quantiser(x)[keep])
