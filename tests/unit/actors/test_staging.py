"""Copies that are started together become as few as their neighbourhood allows, and copy the same bytes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.staging import merge_runs

PAGE_BYTES = 16
PAIRS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9)), unique_by=(lambda pair: pair[1],), max_size=10
)


@given(PAIRS, st.sets(st.integers(0, 9)))
def test_merged_copies_copy_what_the_single_ones_do_and_never_across_a_boundary(pairs, boundaries):
    host = torch.arange(10 * PAGE_BYTES, dtype=torch.uint8).view(10, PAGE_BYTES)
    expected, slots = torch.zeros_like(host), torch.zeros_like(host)
    for source, target in pairs:
        expected[target] = host[source]
    addresses = {host[page].data_ptr() for page in boundaries}
    runs = merge_runs([(host[source], slots[target]) for source, target in pairs], addresses)
    for source, target in runs:
        target.copy_(source)
        inner = range(source.data_ptr() + PAGE_BYTES, source.data_ptr() + source.numel(), PAGE_BYTES)
        assert not addresses.intersection(inner)
    assert torch.equal(slots, expected)


def test_neighbours_that_go_to_neighbours_are_one_copy():
    host, slots = torch.zeros(8, PAGE_BYTES, dtype=torch.uint8), torch.zeros(8, PAGE_BYTES, dtype=torch.uint8)
    pairs = [(host[i], slots[j]) for i, j in ((2, 0), (3, 1), (4, 2), (6, 3), (7, 4), (1, 6))]
    assert [len(source) // PAGE_BYTES for source, _ in merge_runs(pairs)] == [3, 2, 1]


def test_memory_of_others_is_no_neighbour():
    memory = torch.zeros(4, PAGE_BYTES, dtype=torch.uint8)
    left, right = memory[:2], memory[2:].clone()
    pairs = [(left[1], memory[0]), (right[0], memory[1])]
    assert len(merge_runs(pairs)) == 2
