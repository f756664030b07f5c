"""The order of an expert page (`PageLayout`): written out, and back."""

from __future__ import annotations

import pytest
import torch

from kernels.formats import PageLayout, check_page_addresses
from kernels.reference.expert_pages import load_codes, load_scales, store_codes, store_scales
from tests.kernels.builders import generator

SHAPES = [(16, 32), (32, 128), (64, 288), (32, 160), (48, 96), (16, 512)]


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(shape))


def word_offset(row: int, word: int, num_columns: int) -> int:
    """Where a word of eight codes stands, in bytes."""
    block, half, lane = row // 16, row % 2, row % 16 // 2
    num_wide = num_columns // 128
    offset = block * 16 * num_columns // 2
    if word < 16 * num_wide:
        return offset + word // 16 * 1024 + half * 512 + lane * 64 + word % 16 * 4
    narrow = word - 16 * num_wide
    return offset + num_wide * 1024 + narrow // 4 * 256 + half * 128 + lane * 16 + narrow % 4 * 4


def scale_offset(row: int, group: int, num_columns: int) -> int:
    block, half, lane = row // 16, row % 2, row % 16 // 2
    num_wide = num_columns // 128
    offset = block * 16 * num_columns // 32
    if group < 4 * num_wide:
        return offset + group // 4 * 64 + lane * 8 + group % 4 * 2 + half
    return offset + num_wide * 64 + (group - 4 * num_wide) * 16 + lane * 2 + half


@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_every_word_and_scale_stands_where_the_layout_says(num_rows: int, num_columns: int) -> None:
    codes, scales = random_bytes(num_rows, num_columns // 2), random_bytes(num_rows, num_columns // 32)
    code_section, scale_section = torch.empty_like(codes).flatten(), torch.empty_like(scales).flatten()
    store_codes(code_section, codes)
    store_scales(scale_section, scales)
    for row in range(num_rows):
        for word in range(num_columns // 8):
            at = word_offset(row, word, num_columns)
            assert torch.equal(code_section[at : at + 4], codes[row, 4 * word : 4 * word + 4]), (row, word)
        for group in range(num_columns // 32):
            assert scale_section[scale_offset(row, group, num_columns)] == scales[row, group], (row, group)


@pytest.mark.parametrize(("num_rows", "num_columns"), [*SHAPES, (2304, 5120), (5120, 288), (5120, 1152)])
def test_packing_has_an_inverse(num_rows: int, num_columns: int) -> None:
    codes, scales = random_bytes(num_rows, num_columns // 2), random_bytes(num_rows, num_columns // 32)
    section = torch.empty(codes.numel(), dtype=torch.uint8)
    store_codes(section, codes)
    assert torch.equal(load_codes(section, num_rows), codes)
    section = torch.empty(scales.numel(), dtype=torch.uint8)
    store_scales(section, scales)
    assert torch.equal(load_scales(section, num_rows), scales)


@pytest.mark.parametrize("inter", [2304, 1152, 576, 288, 32])
def test_every_section_of_a_page_is_aligned(inter: int) -> None:
    layout = PageLayout(5120, inter)
    sections = (layout.gate_codes, layout.up_codes, layout.gate_scales, layout.up_scales)
    for section in (*sections, layout.down_codes, layout.down_scales):
        assert section.start % 16 == 0
    assert layout.num_bytes % 16 == 0


@pytest.mark.parametrize("inter", [16, 300])
def test_a_slice_that_is_no_multiple_of_32_is_refused(inter: int) -> None:
    with pytest.raises(ValueError, match="intermediate_size in multiples of 32"):
        PageLayout(5120, inter)


def test_addresses_that_no_kernel_can_read_are_refused_by_name() -> None:
    check_page_addresses({0: 4096, 7: 4096 + 16})
    with pytest.raises(ValueError, match=r"addresses\[2\] is 0: the page has no address"):
        check_page_addresses({1: 4096, 2: 0})
    with pytest.raises(ValueError, match=r"addresses\[5\] is 0x1008: pages must be aligned to 16 bytes"):
        check_page_addresses({5: 4096 + 8})
