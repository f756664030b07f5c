"""Sparse attention with a sink (spec section 4.2)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference.attention import KEY_BLOCK, keep_keys, sparse_attention, window_attention
from kernels.reference.quantize import pack_q4n, pack_q8, unpack_q4n, unpack_q8
from kernels.reference.rope import apply_rope
from kernels.tensors import QuantizedRows, QueryRows, WindowPlaces
from tests.kernels.builders import (
    ACCUMULATE,
    NUM_ROWS,
    Array,
    assert_bit_equal,
    assert_rows_are_independent,
    assert_within_bf16_ulps,
    bf16,
    generator,
    normal,
    numpy,
    strided,
)

HEADS, DIM = 4, 32
SCALE = DIM**-0.5

accumulate_types = pytest.mark.parametrize("accumulate", ACCUMULATE)


def attend(
    q: Tensor,
    keys: Tensor,
    is_valid: Tensor | None = None,
    sinks: Tensor | None = None,
    accumulate: torch.dtype = torch.float64,
) -> Tensor:
    """`sparse_attention`; by default of keys that all exist, with sinks that take nothing, in FP64."""
    if is_valid is None:
        is_valid = torch.ones(keys.shape[:2], dtype=torch.bool)
    if sinks is None:
        sinks = torch.full((q.shape[1],), -torch.inf)
    return sparse_attention(q, keys, is_valid, sinks, SCALE, accumulate)


def random_lists(num_rows: int, num_keys: int, std: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and which of them exist: about three quarters."""
    is_valid = torch.rand(num_rows, num_keys, generator=generator(num_keys)) < 0.75
    return normal(num_rows, HEADS, DIM, seed="q", std=std), normal(num_rows, num_keys, DIM, std=std), is_valid


def naive(q: Tensor, keys: Tensor, is_valid: Tensor, sinks: Tensor, block: int = 64) -> Array:
    """The loop of section 4.2, one list entry at a time."""
    out = np.zeros(q.shape)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            running_max, total, value = -1e30, 0.0, np.zeros(q.shape[2])
            for start in range(0, keys.shape[1], block):
                entries = [j for j in range(start, min(start + block, keys.shape[1])) if is_valid[row, j]]
                scores = [(numpy(q)[row, head] * numpy(keys)[row, j]).sum() * SCALE for j in entries]
                new_max = max([running_max, *scores])
                decay = math.exp(running_max - new_max)
                probabilities = np.array([math.exp(score - new_max) for score in scores])
                total = total * decay + probabilities.sum()
                value = value * decay
                for p, j in zip(bf16(probabilities), entries, strict=True):
                    value = value + p * numpy(keys)[row, j]
                running_max = new_max
            if total:
                out[row, head] = value / (total + math.exp(sinks[head].item() - running_max))
    return out


@pytest.mark.parametrize("num_keys", [1, 16, 63, 64, 65, 102, 128, 150])
def test_results_are_those_of_the_loop_over_blocks_of_64(num_keys: int) -> None:
    q, keys, is_valid = random_lists(3, num_keys, std=1.5)
    sinks = normal(HEADS, seed="sinks", dtype=torch.float32)
    expected = naive(q, keys, is_valid, sinks)
    assert_within_bf16_ulps(attend(q, keys, is_valid, sinks), expected, num_ulps=0)
    # FP32 moves scores by 2**-22, which flips the rounding of a probability now and then.
    actual = attend(q, keys, is_valid, sinks, torch.float32)
    assert np.abs(numpy(actual) - expected).max() <= 2**-7 * numpy(keys).max()
    assert (numpy(actual) != bf16(expected)).mean() < 0.05


def test_probabilities_are_rounded_against_the_maximum_of_the_blocks_so_far() -> None:
    q, keys, is_valid = random_lists(8, 150, std=1.5)
    sinks = torch.full((HEADS,), -torch.inf)
    blocks, whole = naive(q, keys, is_valid, sinks), naive(q, keys, is_valid, sinks, block=1000)
    assert (bf16(blocks) != bf16(whole)).any(), "the inputs do not tell the two apart"
    assert KEY_BLOCK == 64
    assert_within_bf16_ulps(attend(q, keys, is_valid), blocks, num_ulps=0)


def test_missing_entries_count_in_the_blocks() -> None:
    q, keys, is_valid = random_lists(8, 150, std=1.5)
    sinks = torch.full((HEADS,), -torch.inf)
    is_valid[:, :40] = False
    moved = naive(q, keys[:, 40:], is_valid[:, 40:], sinks)
    in_place = naive(q, keys, is_valid, sinks)
    assert (bf16(moved) != bf16(in_place)).any(), "the inputs do not tell the two apart"
    assert_within_bf16_ulps(attend(q, keys, is_valid), in_place, num_ulps=0)


@accumulate_types
def test_results_are_close_to_a_softmax_with_one_more_logit(accumulate: torch.dtype) -> None:
    q, keys, is_valid = random_lists(20, 100)
    sinks = normal(HEADS, seed="sinks", dtype=torch.float32)
    scores = torch.einsum("rhd,rkd->rhk", q.double(), keys.double()) * SCALE
    scores = scores.masked_fill(~is_valid.unsqueeze(1), -torch.inf)
    with_sink = torch.cat((scores, sinks.double().view(1, -1, 1).expand(20, -1, 1)), dim=-1)
    p = torch.softmax(with_sink, dim=-1)[..., :-1]
    expected = torch.einsum("rhk,rkd->rhd", p, keys.double())
    # Every probability is off by one BF16 rounding at most, and then the result by another.
    bound = 2**-8 * torch.einsum("rhk,rkd->rhd", p, keys.double().abs()) + 2**-8 * expected.abs() + 1e-6
    difference = (attend(q, keys, is_valid, sinks, accumulate).double() - expected).abs()
    assert (difference <= bound).all()


@accumulate_types
def test_a_sink_takes_probability_and_gives_no_value(accumulate: torch.dtype) -> None:
    q, keys = normal(1, 1, DIM, seed="q"), normal(1, 1, DIM)
    score = (q.double() * keys.double()).sum().item() * SCALE
    for sink in (-40.0, -1.0, 0.0, 2.5, 40.0):
        share = 1 / (1 + math.exp(sink - score))  # the sink's logit is not scaled
        out = attend(q, keys, sinks=torch.tensor([sink]), accumulate=accumulate)
        assert_within_bf16_ulps(out, numpy(keys)[None] * share, num_ulps=1, share=0.05)


@accumulate_types
def test_a_single_key_without_a_sink_is_its_own_average(accumulate: torch.dtype) -> None:
    q, keys, is_valid = random_lists(4, 70)
    is_valid[:] = False
    is_valid[torch.arange(4), [0, 63, 64, 69]] = True
    expected = keys[torch.arange(4), [0, 63, 64, 69]].unsqueeze(1).expand(-1, HEADS, -1)
    assert_bit_equal(attend(q, keys, is_valid, accumulate=accumulate), expected.contiguous())


@accumulate_types
@pytest.mark.parametrize("filler", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_lies_in_the_place_of_a_missing_key_never_reaches_the_result(
    filler: float, accumulate: torch.dtype
) -> None:
    q, keys, is_valid = random_lists(6, 150)
    is_valid[0] = False
    is_valid[1, 64:128] = False
    sinks = normal(HEADS, seed="sinks", dtype=torch.float32)
    expected = attend(q, keys, is_valid, sinks, accumulate)
    keys[~is_valid] = filler
    assert_bit_equal(attend(q, keys, is_valid, sinks, accumulate), expected)


@accumulate_types
@pytest.mark.parametrize("sink", [-30.0, 0.0, 5.0])
@pytest.mark.parametrize("num_keys", [0, 24, 70])
def test_a_row_without_any_key_is_zero(accumulate: torch.dtype, sink: float, num_keys: int) -> None:
    q, keys, is_valid = random_lists(2, num_keys)
    is_valid[:] = False
    out = attend(q, keys, is_valid, torch.full((HEADS,), sink), accumulate)
    assert_bit_equal(out, torch.zeros_like(q))


@accumulate_types
@pytest.mark.parametrize("num_keys", [24, 64, 102])
def test_a_row_does_not_depend_on_the_rows_beside_it(accumulate: torch.dtype, num_keys: int) -> None:
    q, keys, is_valid = random_lists(NUM_ROWS, num_keys)
    sinks = normal(HEADS, seed="sinks", dtype=torch.float32)
    assert_rows_are_independent(
        lambda q, keys, is_valid: attend(q, keys, is_valid, sinks, accumulate),
        *(q, keys, is_valid),
        spoil=[0, 1],
    )


@accumulate_types
def test_inputs_may_have_any_strides_and_no_rows(accumulate: torch.dtype) -> None:
    q, keys, is_valid = random_lists(5, 70)
    expected = attend(q, keys, is_valid, accumulate=accumulate)
    actual = attend(strided(q), strided(keys), strided(is_valid), accumulate=accumulate)
    assert_bit_equal(actual, expected)
    assert attend(q[:0], keys[:0], is_valid[:0], accumulate=accumulate).shape == (0, HEADS, DIM)


WINDOW, RING = 4, 7
FREQUENCIES = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
POISON = 255
"""A scale byte that makes its group NaN in every packed format."""


def test_a_window_has_the_keys_that_its_places_say_and_touches_no_other() -> None:
    """Two sequences: a verify behind a full ring, and a chunk whose window may not reach behind position 2."""
    positions = [[30, 31, 32], [0, 1, 2, 3, 4, 5]]
    rows = QueryRows(torch.tensor([*positions[0], -1, *positions[1]]), torch.tensor([0] * 4 + [1] * 6))
    places = WindowPlaces(
        ring_start=torch.tensor([RING, 0]),
        first_new=torch.tensor([30, 0]),
        new_offset=torch.tensor([-30, 4]),  # row 3 is the key of the padding row
        floor=torch.tensor([0, 2]),
    )
    new, cached = normal(10, DIM, seed="new"), normal(2 * RING, DIM, seed="cached")
    entries = normal(5, DIM, seed="entries")
    packed_new, packed_ring, packed_entries = pack_q8(new), pack_q8(cached), pack_q4n(entries)
    entry_rows = torch.full((10, 3), -1, dtype=torch.int32)
    entry_rows[0], entry_rows[5, 0], entry_rows[3, 0] = torch.tensor([4, 1, 2], dtype=torch.int32), 3, 0
    packed_new.scales[3] = POISON
    packed_ring.scales[[*range(RING), *(RING + p % RING for p in (30, 31, 32, 26))]] = POISON
    packed_entries.scales.view(torch.uint8)[0] = POISON
    q, sinks = normal(10, HEADS, DIM, seed="q"), torch.zeros(HEADS)
    actual = window_attention(
        q,
        rows,
        places,
        packed_new,
        packed_ring,
        ring_size=RING,
        window=WINDOW,
        entries=packed_entries,
        entry_rows=entry_rows,
        sinks=sinks,
        frequencies=FREQUENCIES,
        scale=SCALE,
        accumulate=torch.float64,
    )
    values, ring_values = unpack_q8(pack_q8(new)), unpack_q8(pack_q8(cached))
    for row, (position, sequence) in enumerate(zip(*(t.tolist() for t in rows), strict=True)):
        keys = torch.zeros(1, WINDOW + 3, DIM, dtype=torch.bfloat16)
        is_valid = torch.zeros(1, WINDOW + 3, dtype=torch.bool)
        for slot, p in enumerate(range(position - WINDOW + 1, position + 1) if position >= 0 else ()):
            if p >= (0, 2)[sequence]:
                is_new = p >= (30, 0)[sequence]
                keys[0, slot] = values[p + (-30, 4)[sequence]] if is_new else ring_values[RING + p % RING]
                is_valid[0, slot] = True
        for slot, entry in enumerate(entry_rows[row].tolist() if position >= 0 else ()):
            if entry >= 0:
                keys[0, WINDOW + slot] = unpack_q4n(pack_q4n(entries))[entry]
                is_valid[0, WINDOW + slot] = True
        at = torch.tensor([position])
        core = attend(apply_rope(q[row : row + 1], at, FREQUENCIES), keys, is_valid, sinks)
        expected = apply_rope(core, at, FREQUENCIES, inverse=True)
        assert_bit_equal(actual[row : row + 1], expected)
    assert not actual[3].any(), "a padding row sees nothing"


def test_kept_keys_go_to_their_ring_rows_and_others_nowhere() -> None:
    new, ring = pack_q8(normal(4, DIM, seed="new")), pack_q8(normal(6, DIM, seed="ring"))
    before = QuantizedRows(*(part.clone() for part in ring))
    keep_keys(new, ring, torch.tensor([5, -1, 0, -1]))
    for part, old, source in zip(ring, before, new, strict=True):
        expected = old.view(torch.uint8).clone()
        expected[5], expected[0] = source.view(torch.uint8)[0], source.view(torch.uint8)[2]
        assert_bit_equal(part.view(torch.uint8), expected)
