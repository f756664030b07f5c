"""Which stored patterns are numbers: all of them, format by format, against torch's own reading."""

import numpy as np
import pytest
import torch

from kernels.reference.quantize import decode_ue8m0
from model.inventory import StoredDtype
from model.value_check import find_bad_value

EIGHT_BITS = torch.arange(256, dtype=torch.int32).to(torch.uint8)
SIXTEEN_BITS = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)


def bad_patterns(patterns: torch.Tensor, dtype: StoredDtype) -> list[int]:
    rows = patterns.unsqueeze(1).view(torch.uint8).numpy()
    return [index for index, row in enumerate(rows) if find_bad_value(row, dtype) is not None]


def not_finite(values: torch.Tensor) -> list[int]:
    return torch.nonzero(~torch.isfinite(values.to(torch.float32))).flatten().tolist()


def test_of_all_ue8m0_codes_only_255_is_refused() -> None:
    assert bad_patterns(EIGHT_BITS, StoredDtype.F8_E8M0) == not_finite(decode_ue8m0(EIGHT_BITS)) == [255]


def test_of_all_e4m3_codes_the_two_nans_are_refused() -> None:
    values = EIGHT_BITS.view(torch.float8_e4m3fn)
    assert bad_patterns(EIGHT_BITS, StoredDtype.F8_E4M3) == not_finite(values) == [0x7F, 0xFF]


def test_of_all_bf16_patterns_those_that_are_not_finite_are_refused() -> None:
    assert bad_patterns(SIXTEEN_BITS, StoredDtype.BF16) == not_finite(SIXTEEN_BITS.view(torch.bfloat16))


@pytest.mark.parametrize(
    ("value", "is_bad"),
    [
        (torch.inf, True),
        (-torch.inf, True),
        (torch.nan, True),
        (-torch.nan, True),
        (torch.finfo(torch.float32).max, False),
        (torch.finfo(torch.float32).min, False),
        (-0.0, False),
        (1e-45, False),
    ],
)
def test_f32_values_that_are_not_finite_are_refused(value: float, is_bad: bool) -> None:
    stored = np.array([0.0, value], np.float32).view(np.uint8)
    found = find_bad_value(stored, StoredDtype.F32)
    assert (found is not None and found.index == 1) == is_bad


def test_every_byte_of_packed_codes_is_a_number() -> None:
    assert bad_patterns(EIGHT_BITS, StoredDtype.I8) == []


@pytest.mark.parametrize("index", [0, (1 << 18) - 1, 1 << 18, 600_000])
def test_first_bad_value_is_found_wherever_it_lies(index: int) -> None:
    codes = np.full(600_001, 127, np.uint8)
    codes[index:] = 255
    found = find_bad_value(codes, StoredDtype.F8_E8M0)
    assert found is not None
    assert found.index == index


def test_nothing_stored_holds_nothing_bad() -> None:
    assert find_bad_value(np.empty(0, np.uint8), StoredDtype.BF16) is None
