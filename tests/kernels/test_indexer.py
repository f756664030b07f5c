"""Index scores, candidate pool and selection (spec sections 4.4 and 4.5)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference.indexer import (
    best_entries,
    candidate_pool,
    index_scores,
    mask_outside_pool,
    select_entries,
)
from kernels.reference.quantize import pack_q4u, quantize_q4u
from kernels.tensors import QueryRows
from tests.kernels.builders import (
    ACCUMULATE,
    NUM_ROWS,
    assert_bit_equal,
    assert_rows_are_independent,
    bf16,
    generator,
    normal,
    numpy,
    strided,
)

HEADS, DIM = 4, 64
INF = torch.inf

accumulate_types = pytest.mark.parametrize("accumulate", ACCUMULATE)
roundings = pytest.mark.parametrize("round_bf16", [True, False])
head_counts = pytest.mark.parametrize(("num_heads", "dim"), [(HEADS, DIM), (32, 128)])


def index_inputs(
    num_rows: int, num_entries: int, num_heads: int = HEADS, dim: int = DIM
) -> tuple[Tensor, Tensor, Tensor]:
    """Fake-quantised queries and keys, and head weights of their usual size."""
    q = quantize_q4u(normal(num_rows, num_heads, dim, seed="q"))
    keys = quantize_q4u(normal(num_entries, dim, seed="keys", std=0.5))
    return q, keys, normal(num_rows, num_heads, seed="weights", std=(dim * num_heads) ** -0.5)


def score(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    num_visible: Tensor | None = None,
    round_bf16: bool = True,
    accumulate: torch.dtype = torch.float32,
) -> Tensor:
    """`index_scores`, by default of entries that are all visible, rounded, in FP32."""
    if num_visible is None:
        num_visible = torch.full((len(q),), len(keys))
    return index_scores(q, keys, weights, num_visible, round_bf16=round_bf16, accumulate=accumulate)


def tied_scores(num_rows: int, num_entries: int) -> Tensor:
    """Scores of few values, most of them shared, -inf among them."""
    scores = torch.randint(-2, 3, (num_rows, num_entries), generator=generator(num_entries)).float()
    return torch.where(scores == -2, -INF, scores)


def mask(scores: Tensor, num_visible: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(scores.shape[1]) >= num_visible.unsqueeze(1), -INF)


@accumulate_types
@roundings
def test_scores_are_weighted_sums_of_clipped_products(accumulate: torch.dtype, round_bf16: bool) -> None:
    q, keys, weights = index_inputs(5, 9)
    num_visible = torch.tensor([0, 1, 4, 8, 9])
    scores = score(q, keys, weights, num_visible, round_bf16, accumulate)
    rounded = bf16 if round_bf16 else np.asarray
    for row in range(5):
        for entry in range(9):
            total = 0.0
            for head in range(HEADS):
                product = rounded((numpy(q)[row, head] * numpy(keys)[entry]).sum())
                total += float(rounded(max(product, 0) * numpy(weights)[row, head]))
            expected = float(rounded(np.array(total))) if entry < num_visible[row] else -INF
            actual = scores[row, entry].item()
            if round_bf16 or accumulate == torch.float64:
                assert actual == pytest.approx(expected, rel=1e-14)
            else:
                assert actual == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert scores.dtype == accumulate


@pytest.mark.parametrize(
    ("key", "weights", "rounded", "exact"),
    [
        # A product of nine bits, 226 + 31 ones.
        ([226.0] + [1.0] * 31, [1.0, 0.0], 256, 257),
        # A weighted head of nine bits.
        ([3.0] + [0.0] * 31, [129 / 128, 0.0], 388 / 128, 387 / 128),
        # A sum of nine bits, 192 + 3 / 2.
        ([3.0] + [0.0] * 31, [64.0, 0.5], 194, 193.5),
    ],
)
def test_products_weighted_heads_and_sums_are_each_rounded(
    key: list[float], weights: list[float], rounded: float, exact: float
) -> None:
    q = torch.ones(1, 2, 32, dtype=torch.bfloat16)
    keys, head_weights = torch.tensor([key], dtype=q.dtype), torch.tensor([weights], dtype=q.dtype)
    assert score(q, keys, head_weights).item() == rounded
    assert score(q, keys, head_weights, round_bf16=False).item() == exact


@accumulate_types
@roundings
def test_entries_that_are_not_visible_never_reach_a_score(accumulate: torch.dtype, round_bf16: bool) -> None:
    q, keys, weights = index_inputs(3, 12)
    num_visible = torch.tensor([0, 7, 5])
    expected = score(q, keys, weights, num_visible, round_bf16, accumulate)
    keys[7:] = torch.nan
    assert_bit_equal(score(q, keys, weights, num_visible, round_bf16, accumulate), expected)
    assert (expected == -INF).sum(dim=1).tolist() == [12, 5, 7]


@accumulate_types
@roundings
@head_counts
def test_a_row_of_scores_does_not_depend_on_the_rows_beside_it(
    accumulate: torch.dtype, round_bf16: bool, num_heads: int, dim: int
) -> None:
    q, keys, weights = index_inputs(NUM_ROWS, 45, num_heads, dim)
    num_visible = torch.randint(0, 46, (NUM_ROWS,), generator=generator(0))
    assert_rows_are_independent(
        lambda q, weights, visible: score(q, keys, weights, visible, round_bf16, accumulate),
        *(q, weights, num_visible),
        spoil=[0, 1],
    )


@accumulate_types
@roundings
@head_counts
def test_a_score_does_not_depend_on_how_many_entries_there_are(
    accumulate: torch.dtype, round_bf16: bool, num_heads: int, dim: int
) -> None:
    q, keys, weights = index_inputs(6, 150, num_heads, dim)
    whole = score(q, keys, weights, None, round_bf16, accumulate)
    for num_entries in range(1, 150):
        for rows in (slice(0, 6), slice(2, 3)):
            scores = score(q[rows], keys[:num_entries], weights[rows], None, round_bf16, accumulate)
            assert_bit_equal(scores, whole[rows, :num_entries].contiguous())


@accumulate_types
def test_scores_take_any_strides_no_rows_and_no_entries(accumulate: torch.dtype) -> None:
    q, keys, weights = index_inputs(5, 9)
    expected = score(q, keys, weights, accumulate=accumulate)
    loose = score(strided(q), strided(keys), strided(weights), accumulate=accumulate)
    assert_bit_equal(loose, expected)
    assert score(q[:0], keys, weights[:0], accumulate=accumulate).shape == (0, 9)
    assert score(q, keys[:0], weights, accumulate=accumulate).shape == (5, 0)


def naive_selection(scores: list[float], num_topk: int) -> list[int]:
    allowed = [entry for entry, score in enumerate(scores) if score != -INF]
    best = sorted(allowed, key=lambda entry: (-scores[entry], entry))[:num_topk]
    return sorted(best) + [-1] * (num_topk - len(best))


@pytest.mark.parametrize("num_entries", [0, 1, 7, 8, 9, 40, 200])
def test_the_best_entries_are_selected_ties_to_the_lower_index(num_entries: int) -> None:
    scores = tied_scores(50, num_entries)
    expected = [naive_selection(row, 8) for row in scores.tolist()]
    selected = best_entries(scores, 8)
    assert (selected.dtype, selected.shape) == (torch.int64, (50, 8))
    assert selected.tolist() == expected
    assert best_entries(scores.double(), 8).tolist() == expected
    assert best_entries(strided(scores), 8).tolist() == expected


def test_equal_scores_select_the_first_entries() -> None:
    assert best_entries(torch.full((1, 30), 0.5), 4).tolist() == [[0, 1, 2, 3]]
    # Zero and negative zero are equal.
    assert best_entries(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 2).tolist() == [[0, 1]]


def test_a_row_that_sees_nothing_selects_nothing() -> None:
    assert best_entries(torch.full((2, 5), -INF), 3).tolist() == [[-1] * 3] * 2


def test_a_selection_does_not_depend_on_entries_or_rows_it_does_not_see() -> None:
    scores = tied_scores(NUM_ROWS, 40)
    assert_rows_are_independent(lambda rows: best_entries(rows, 8), scores)
    longer = torch.cat((scores, torch.full((NUM_ROWS, 17), -INF)), dim=1)
    assert_bit_equal(best_entries(longer, 8), best_entries(scores, 8))
    assert best_entries(scores[:0], 8).shape == (0, 8)


def naive_pool(scores: list[float], num_visible: int, block_size: int, num_blocks: int) -> list[bool]:
    blocks = range(-(-len(scores) // block_size))
    pinned = (num_visible - 1) // block_size
    best = {
        block: INF if block == pinned else max(scores[block * block_size : (block + 1) * block_size])
        for block in blocks
    }
    chosen = sorted(blocks, key=lambda block: (-best[block], block))[:num_blocks]
    kept = {block for block in chosen if best[block] != -INF}
    return [block in kept for block in blocks]


@pytest.mark.parametrize("num_entries", [1, 3, 4, 5, 11, 12, 13, 15, 16, 17, 30])
@pytest.mark.parametrize("num_blocks", [1, 3, 2048])
def test_the_pool_is_the_best_blocks_and_the_newest(num_entries: int, num_blocks: int) -> None:
    num_visible = torch.randint(1, num_entries + 1, (60,), generator=generator(num_entries))
    num_visible[0], num_visible[1] = 1, num_entries
    scores = mask(tied_scores(60, num_entries), num_visible)
    pool = candidate_pool(scores, num_visible, 4, num_blocks)
    rows = zip(scores.tolist(), num_visible.tolist(), strict=True)
    assert pool.tolist() == [naive_pool(row, visible, 4, num_blocks) for row, visible in rows]
    assert candidate_pool(strided(scores), num_visible, 4, num_blocks).tolist() == pool.tolist()


def blocks_of(scores: list[float], num_visible: int, num_blocks: int) -> list[int]:
    """Blocks of four entries in the pool of one row whose blocks hold equal scores."""
    row = torch.tensor([scores], dtype=torch.float32).repeat_interleave(4, dim=1)
    visible = torch.tensor([num_visible])
    return candidate_pool(mask(row, visible), visible, 4, num_blocks)[0].nonzero().flatten().tolist()


def test_the_newest_block_is_kept_however_low_its_score() -> None:
    assert blocks_of([5, 4, 3, -9], num_visible=16, num_blocks=2) == [0, 3]
    assert blocks_of([5, 4, 3, -9], num_visible=13, num_blocks=1) == [3]
    # The newest visible entry decides, not the last entry there is.
    assert blocks_of([5, 4, -9, 3], num_visible=12, num_blocks=2) == [0, 2]
    assert blocks_of([5, 4, -9, 3], num_visible=8, num_blocks=1) == [1]


def test_ties_between_blocks_go_to_the_lower_one() -> None:
    assert blocks_of([1, 1, 1, 1, 0], num_visible=20, num_blocks=3) == [0, 1, 4]
    assert blocks_of([0, 1, 1, 1, 0], num_visible=20, num_blocks=3) == [1, 2, 4]


def test_blocks_without_a_visible_entry_are_dropped() -> None:
    assert blocks_of([1, 2, 3, 4], num_visible=5, num_blocks=4) == [0, 1]
    assert blocks_of([-INF, 2, 3, 4], num_visible=16, num_blocks=4) == [1, 2, 3]
    assert blocks_of([-INF, -INF, 3, -INF], num_visible=16, num_blocks=4) == [2, 3]


def test_a_pool_does_not_depend_on_entries_or_rows_it_does_not_see() -> None:
    num_visible = torch.randint(1, 42, (NUM_ROWS,), generator=generator(0))
    scores = mask(tied_scores(NUM_ROWS, 41), num_visible)
    pool = candidate_pool(scores, num_visible, 4, 3)
    assert_rows_are_independent(
        lambda rows, visible: candidate_pool(rows, visible, 4, 3), scores, num_visible
    )
    for longer in (1, 3, 4, 30):
        wide = torch.cat((scores, torch.full((NUM_ROWS, longer), -INF)), dim=1)
        wide_pool = candidate_pool(wide, num_visible, 4, 3)
        assert_bit_equal(wide_pool[:, :11].contiguous(), pool)
        assert not wide_pool[:, 11:].any()
    assert candidate_pool(scores[:0], num_visible[:0], 4, 3).shape == (0, 11)


@pytest.mark.parametrize("num_entries", [1, 7, 8, 9])
def test_only_entries_of_blocks_in_the_pool_keep_their_scores(num_entries: int) -> None:
    scores = normal(2, num_entries, seed="scores", dtype=torch.float32)
    pool = torch.tensor([[True, False, True], [False, True, False]])[:, : -(-num_entries // 4)]
    masked = mask_outside_pool(scores, pool, 4)
    for row in range(2):
        for entry in range(num_entries):
            expected = scores[row, entry].item() if pool[row, entry // 4] else -INF
            assert masked[row, entry].item() == expected


@pytest.mark.parametrize("num_topk", [3, 100])
def test_rows_choose_among_the_entries_of_their_own_blocks(num_topk: int) -> None:
    """Two sequences with interleaved blocks of four entries, padding rows, and NaN wherever nobody may look."""
    per_block, pool_block, num_pooled = 4, 2, 3
    tables = torch.tensor([[3, 0, 5], [1, 6, 0]])
    rows = QueryRows(torch.tensor([8, 9, -1, 4, 0, -1]), torch.tensor([0, 0, 0, 1, 1, 1]))
    q, keys, weights = index_inputs(6, 28)
    packed = pack_q4u(keys)
    visible = [{3, 0, 5}, {1, 6}]
    used = {block * per_block + i for blocks in visible for block in blocks for i in range(per_block)}
    packed.scales[[row for row in range(28) if row not in used]] = 255
    packed.scales[[5 * per_block + 2, 5 * per_block + 3, 6 * per_block + 1]] = 255  # not written yet

    def select(pool: Tensor | None, make_pool: int | None) -> tuple[Tensor, Tensor | None]:
        return select_entries(
            q,
            weights,
            packed,
            rows,
            tables,
            ratio=1,
            entries_per_block=per_block,
            num_topk=num_topk,
            pool_block=pool_block,
            pool=pool,
            make_pool=make_pool,
            max_entries=10,
            accumulate=torch.float64,
        )

    chosen, made = select(None, num_pooled)
    assert made is not None
    pooled, none = select(made, None)
    assert none is None
    for row, (position, sequence) in enumerate(zip(*(t.tolist() for t in rows), strict=True)):
        if position < 0:
            assert {*chosen[row].tolist(), *made[row].tolist(), *pooled[row].tolist()} == {-1}
            continue
        entries = torch.arange(position + 1)
        places = tables[sequence, entries // per_block] * per_block + entries % per_block
        num_visible = torch.tensor([position + 1])
        scores = index_scores(
            q[row : row + 1],
            keys[places],
            weights[row : row + 1],
            num_visible,
            round_bf16=False,
            accumulate=torch.float64,
        )
        blocks = candidate_pool(scores, num_visible, pool_block, num_pooled)
        assert [b for b in made[row].tolist() if b >= 0] == blocks[0].nonzero().flatten().tolist()
        for actual, allowed in ((chosen, scores), (pooled, mask_outside_pool(scores, blocks, pool_block))):
            best = [e for e in best_entries(allowed, num_topk)[0].tolist() if e >= 0]
            filler = [-1] * (num_topk - len(best))
            assert actual[row].tolist() == [*places[best].tolist(), *filler]
