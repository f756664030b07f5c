from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployment.kv_blocks import NULL_BLOCK, KVBlocks, StateSlots, num_blocks_for


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_tokens_take_whole_blocks(num_tokens: int, num_blocks: int):
    assert num_blocks_for(num_tokens, block_size=4) == num_blocks


def test_every_block_but_the_null_block_is_handed_out():
    kv = KVBlocks(num_blocks=5, block_size=2)
    assert kv.cover("a", 8)
    assert sorted(array("i", kv.block_table("a"))) == [1, 2, 3, 4]
    assert NULL_BLOCK not in array("i", kv.block_table("a"))
    assert kv.num_free == 0


def test_a_table_grows_only_when_a_token_needs_a_new_block():
    kv = KVBlocks(num_blocks=5, block_size=2)
    for num_tokens, num_free in [(1, 3), (2, 3), (3, 2), (4, 2), (5, 1)]:
        assert kv.cover("a", num_tokens)
        assert kv.num_free == num_free


def test_a_growing_table_keeps_the_blocks_it_has():
    kv = KVBlocks(num_blocks=8, block_size=2)
    kv.cover("a", 3)
    before = kv.block_table("a")
    kv.cover("b", 3)
    kv.cover("a", 6)
    assert kv.block_table("a")[: len(before)] == before
    assert len(kv.block_table("a")) > len(before)


def test_a_table_covers_whole_blocks():
    kv = KVBlocks(num_blocks=8, block_size=2)
    kv.cover("a", 5)
    assert kv.covers("a", 6)
    assert not kv.covers("a", 7)


def test_a_request_that_does_not_fit_gets_nothing():
    kv = KVBlocks(num_blocks=4, block_size=2)
    assert kv.cover("a", 4)
    assert not kv.cover("a", 9)
    assert not kv.cover("b", 3)
    assert kv.num_free == 1
    assert kv.owners == {"a"}
    kv.check_integrity()


def test_released_blocks_are_free_again():
    kv = KVBlocks(num_blocks=4, block_size=2)
    kv.cover("a", 6)
    kv.release("a")
    assert kv.num_free == 3
    assert kv.owners == set()
    assert kv.cover("b", 6)


def test_releasing_twice_is_an_error():
    kv = KVBlocks(num_blocks=4, block_size=2)
    kv.cover("a", 6)
    kv.release("a")
    with pytest.raises(KeyError):
        kv.release("a")


def test_a_block_in_two_tables_breaks_integrity():
    kv = KVBlocks(num_blocks=4, block_size=2)
    kv.cover("a", 2)
    kv.cover("b", 2)
    kv._tables["b"] = kv._tables["a"]
    with pytest.raises(AssertionError, match="_tables"):
        kv.check_integrity()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=60), st.integers(1, 12))
def test_any_covering_and_releasing_keeps_every_block_in_one_place(
    operations: list[tuple[str, int]], num_blocks: int
):
    kv = KVBlocks(num_blocks, block_size=3)
    for request_id, num_tokens in operations:
        num_free = kv.num_free
        if num_tokens == 0 and request_id in kv.owners:
            kv.release(request_id)
            assert kv.num_free > num_free
        elif kv.cover(request_id, num_tokens):
            assert num_tokens == 0 or kv.covers(request_id, num_tokens)
        else:
            assert kv.num_free == num_free
        kv.check_integrity()
    for request_id in list(kv.owners):
        kv.release(request_id)
    assert kv.num_free == num_blocks - 1


def test_each_slot_has_one_owner():
    slots = StateSlots(num_slots=2)
    slots.acquire("a")
    slots.acquire("b")
    assert {slots.slot("a"), slots.slot("b")} == {0, 1}
    assert slots.num_free == 0
    with pytest.raises(AssertionError, match="no free slot"):
        slots.acquire("c")


def test_a_request_owns_one_slot():
    slots = StateSlots(num_slots=2)
    slots.acquire("a")
    with pytest.raises(AssertionError, match="already owns"):
        slots.acquire("a")


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_any_acquiring_and_releasing_keeps_every_slot_in_one_place(request_ids: list[str]):
    slots = StateSlots(num_slots=3)
    for request_id in request_ids:
        if request_id in slots.owners:
            slots.release(request_id)
        elif slots.num_free:
            slots.acquire(request_id)
        slots.check_integrity()
    assert slots.num_free == 3 - len(slots.owners)
