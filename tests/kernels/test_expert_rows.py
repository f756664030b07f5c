"""Grouping, permutation and sum of rows: the kernels themselves, by Triton's interpreter where there is no GPU.

The interpreter needs no bf16 here but gets fp16 instead, as it does where it multiplies.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.expert_rows import MAX_PAIRS_IN_ONE_PROGRAM, GroupedRows, combine, group_rows, tile_rows
from tests.kernels.builders import assert_bit_equal, generator, normal

NUM_EXPERTS = 384
"""Of the layer, on all ranks."""


def route(num_tokens: int, num_topk: int) -> Tensor:
    order = torch.rand(num_tokens, NUM_EXPERTS, generator=generator(num_tokens)).argsort(dim=1)
    return order[:, :num_topk].sort(dim=1).values.contiguous()


def group(
    topk_idx: Tensor, num_experts: int, first_expert: int, is_member: Tensor | None = None
) -> GroupedRows:
    x = torch.zeros(len(topk_idx), 32, dtype=torch.float16)
    return group_rows(x, topk_idx, is_member, num_experts, first_expert, in_k_order=False)[0]


def assert_grouped(
    grouped: GroupedRows, topk_idx: Tensor, num_experts: int, first_expert: int, is_member: Tensor | None
) -> None:
    """Against lists, written as the definition says."""
    rows: dict[int, list[int]] = {expert: [] for expert in range(num_experts)}
    for pair, expert in enumerate(topk_idx.flatten().tolist()):
        local = expert - first_expert
        if local in rows and (is_member is None or is_member[local]):
            rows[local].append(pair)
    assert grouped.counts.tolist() == [len(pairs) for pairs in rows.values()]
    for expert, pairs in rows.items():
        begin = int(grouped.offsets[expert])
        assert grouped.pairs[begin : begin + len(pairs)].tolist() == pairs, expert
    active = [expert for expert, pairs in rows.items() if pairs]
    assert grouped.active.tolist() == active + [-1] * (grouped.active.numel() - len(active))


@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_experts", "first_expert"),
    [(1, 6, 384, 0), (6, 6, 48, 96), (6, 6, 384, 0), (85, 6, 384, 0), (86, 6, 48, 336), (150, 4, 383, 1)],
)
def test_rows_are_grouped_by_expert_in_pair_order(
    num_tokens: int, num_topk: int, num_experts: int, first_expert: int
) -> None:
    topk_idx = route(num_tokens, num_topk)
    assert_grouped(group(topk_idx, num_experts, first_expert), topk_idx, num_experts, first_expert, None)
    wanted = torch.rand(num_experts, generator=generator("wanted")) < 0.6
    grouped = group(topk_idx, num_experts, first_expert, wanted)
    assert_grouped(grouped, topk_idx, num_experts, first_expert, wanted)


@pytest.mark.parametrize("num_tokens", [3, MAX_PAIRS_IN_ONE_PROGRAM + 1])
def test_one_expert_may_take_all_rows_or_none(num_tokens: int) -> None:
    topk_idx = torch.full((num_tokens, 1), 5)
    assert_grouped(group(topk_idx, 8, 0), topk_idx, 8, 0, None)
    assert_grouped(group(topk_idx, 8, 6), topk_idx, 8, 6, None)


def test_no_rows_are_no_rows() -> None:
    grouped = group(torch.empty(0, 6, dtype=torch.int64), 48, 0)
    assert grouped.counts.tolist() == [0] * 48
    assert grouped.pairs.numel() == grouped.active.numel() == tile_rows(grouped, 64).experts.numel() == 0


def place_for_registers(column: int, num_columns: int) -> int:
    """`(word, quarter, step, half, pair)` of `kernels.expert_tiles`, in a wide and in a narrow tile."""
    pair, step, half = column % 8 // 4, column % 4 // 2, column % 2
    code = (step * 2 + half) * 2 + pair
    if column < num_columns // 128 * 128:
        tile, quarter, word = column // 128, column % 128 // 32, column % 32 // 8
        return tile * 128 + word * 32 + quarter * 8 + code
    return column // 32 * 32 + column % 32 // 8 * 8 + code


def place_in_k_order(column: int, num_columns: int) -> int:
    pair, step, half = column % 8 // 4, column % 4 // 2, column % 2
    if column < num_columns // 128 * 128:
        tile, quarter, word = column // 128, column % 128 // 32, column % 32 // 8
        return tile * 128 + (((word * 2 + step) * 2 + half) * 4 + quarter) * 2 + pair
    quarter = column % 32 // 8
    return column // 32 * 32 + ((step * 2 + half) * 4 + quarter) * 2 + pair


@pytest.mark.parametrize("num_columns", [32, 128, 224, 288, 1184])
@pytest.mark.parametrize("in_k_order", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 300])
def test_columns_stand_where_the_product_reads_them(
    num_columns: int, in_k_order: bool, num_tokens: int
) -> None:
    x = normal(num_tokens, num_columns, dtype=torch.float16)
    permuted = group_rows(x, route(num_tokens, 2), None, 8, 0, in_k_order=in_k_order)[1]
    place = place_in_k_order if in_k_order else place_for_registers
    places = [place(column, num_columns) for column in range(num_columns)]
    assert sorted(places) == list(range(num_columns))
    assert_bit_equal(permuted[:, places], x)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("num_tokens", [3, 200])
def test_tiles_cover_every_row_once(rows: int, num_tokens: int) -> None:
    grouped = group(route(num_tokens, 6) % 12, 12, 0)
    tiles = tile_rows(grouped, rows)
    expected = [(e, start) for e in range(12) for start in range(0, int(grouped.counts[e]), rows)]
    actual = list(zip(tiles.experts.tolist(), tiles.starts.tolist(), strict=True))
    assert actual[: len(expected)] == expected
    assert all(expert == -1 for expert, _ in actual[len(expected) :])


@pytest.mark.parametrize("hidden", [64, 1056])
def test_local_choices_are_summed_from_left_to_right(hidden: int) -> None:
    topk_idx, local = route(9, 6), range(100, 250)
    parts = normal(9, 6, hidden, dtype=torch.float16)
    expected = torch.zeros(9, hidden)
    for choice in range(6):
        is_local = ((topk_idx[:, choice] >= local.start) & (topk_idx[:, choice] < local.stop)).unsqueeze(1)
        expected = torch.where(is_local, expected + parts[:, choice], expected)
        parts[:, choice][~is_local.squeeze(1)] = torch.nan  # is never read
    assert_bit_equal(combine(parts, topk_idx, local), expected)
    assert combine(parts[:0], topk_idx[:0], local).shape == (0, hidden)
