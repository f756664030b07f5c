"""A checksum sees every changed word, and is the same sum whoever computes it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.checksums import page_checksum, page_checksums
from tests.unit.actors.builders import random_page

NUM_BYTES = 4608


def checksum_by_definition(page: torch.Tensor) -> int:
    words = [int.from_bytes(bytes(page[i : i + 8].tolist()), "little") for i in range(0, len(page), 8)]
    weights = [(i * 0x9E3779B97F4A7C15) | 1 for i in range(1, len(words) + 1)]
    unsigned = sum(word * weight for word, weight in zip(words, weights, strict=True)) % 2**64
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


def test_it_is_the_sum_that_the_docstring_says():
    for seed in range(5):
        page = random_page(seed, NUM_BYTES)
        assert page_checksum(page) == checksum_by_definition(page)


@given(st.integers(0, NUM_BYTES - 1), st.integers(1, 255), st.integers(0, 3))
def test_no_changed_byte_goes_unnoticed(at, flipped, seed):
    page = random_page(seed, NUM_BYTES)
    before = page_checksum(page)
    page[at] ^= flipped
    assert page_checksum(page) != before


@given(st.integers(0, NUM_BYTES // 8 - 1), st.integers(0, NUM_BYTES // 8 - 1))
def test_words_that_change_places_are_noticed(first, second):
    page = random_page(0, NUM_BYTES)
    before, words = page_checksum(page), page.view(torch.int64)
    words[[first, second]] = words[[second, first]]
    assert (page_checksum(page) == before) == (first == second)


@pytest.mark.gpu
def test_a_gpu_gets_the_same_sums():
    pages = torch.stack([random_page(page, NUM_BYTES) for page in range(7)])
    assert page_checksums(pages.cuda()).tolist() == page_checksums(pages).tolist()
