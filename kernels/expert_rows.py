"""Rows of the expert product: grouped by expert, columns in the order it reads, its outputs summed. Triton.

`kernels.expert_tiles` says why the columns of activations are permuted, and into which two orders.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_PAIRS_IN_ONE_PROGRAM = 512
"""Up to here one program groups all pairs, beside those that permute columns; more are grouped in blocks."""
_BLOCK = 256
_COLUMNS = 1024
_CHUNK = 32
_EXPERTS = 16
_TILES = 32


class GroupedRows(NamedTuple):
    """The (token, choice) pairs of local experts, sorted by expert; a pair is `token * num_topk + choice`."""

    pairs: Tensor
    """`[num_pairs]` int32: sorted by expert, then by pair; undefined where local pairs end."""
    active: Tensor
    """`[min(num_experts, num_pairs)]` int32: experts that have rows, ascending, then -1."""
    offsets: Tensor
    """`[num_experts]` int32: where an expert's rows begin in `pairs`."""
    counts: Tensor
    """`[num_experts]` int32."""


class RowTiles(NamedTuple):
    """All rows of all experts in tiles of one expert each."""

    experts: Tensor
    """`[max_tiles]` int32: each tile's expert; -1 where there is no tile."""
    starts: Tensor
    """`[max_tiles]` int32: its first row, counted from its expert's first."""


def group_rows(
    x: Tensor,
    topk_idx: Tensor,
    is_member: Tensor | None,
    num_experts: int,
    first_expert: int,
    *,
    in_k_order: bool,
) -> tuple[GroupedRows, Tensor]:
    """Group the rows by expert and permute the columns of `x`; no host synchronisation.

    Args:
        x: `[num_tokens, hidden]` bf16, contiguous, `hidden` a multiple of 32.
        topk_idx: `[num_tokens, num_topk]` int64, contiguous, global expert ids.
        is_member: `[num_experts]` bool: which local experts take part; None for all.
        num_experts: number of local experts.
        first_expert: global id of local expert 0.
        in_k_order: the order for operands in shared memory rather than that for loads into registers.
    Returns: the groups and `[num_tokens, hidden]` bf16, the permuted `x`.
    """
    num_pairs = topk_idx.numel()
    permuted = torch.empty_like(x)
    pairs, active, offsets, counts = (
        torch.empty(size, dtype=torch.int32, device=x.device)
        for size in (num_pairs, min(num_experts, num_pairs), num_experts, num_experts)
    )
    grouped = GroupedRows(pairs, active, offsets, counts)
    if num_pairs == 0:
        counts.zero_()
        return grouped, permuted
    overlap = _overlaps_launches(x.device)
    source = (topk_idx, is_member, num_pairs, num_experts, first_expert)
    columns = {"HIDDEN": x.shape[1], "COLUMNS": _COLUMNS, "IN_K_ORDER": in_k_order}
    num_parts = x.shape[0] * triton.cdiv(x.shape[1], _COLUMNS)
    block_e = max(16, triton.next_power_of_2(num_experts + 1))
    if num_pairs <= MAX_PAIRS_IN_ONE_PROGRAM:
        _group_and_permute_kernel[(1 + num_parts,)](
            *(*source, *grouped, active.numel(), x, permuted),
            **columns,
            BLOCK_P=max(16, triton.next_power_of_2(num_pairs)),
            BLOCK_E=block_e,
            CHUNK=_CHUNK,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=8,
        )
        return grouped, permuted
    _permute_kernel[(num_parts,)](x, permuted, **columns)
    blocks = {"BLOCK_P": _BLOCK, "BLOCK_E": block_e, "num_warps": 8}
    num_blocks = triton.cdiv(num_pairs, _BLOCK)
    block_counts = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=x.device)
    _count_pairs_kernel[(num_blocks,)](*source, block_counts, **blocks)
    _sum_blocks_kernel[(triton.cdiv(num_experts, _EXPERTS),)](
        *(block_counts, counts, num_experts, num_blocks),
        BLOCKS=triton.next_power_of_2(num_blocks),
        EXPERTS=_EXPERTS,
    )
    _sum_experts_kernel[(1,)](counts, offsets, active, num_experts, active.numel(), BLOCK_E=block_e)
    _place_pairs_kernel[(num_blocks,)](*source, pairs, offsets, block_counts, CHUNK=_CHUNK, **blocks)
    return grouped, permuted


def tile_rows(grouped: GroupedRows, rows: int) -> RowTiles:
    """Cut every expert's rows into tiles of `rows`; no host synchronisation."""
    # An expert's last tile may have a single row.
    max_tiles = grouped.active.numel() + grouped.pairs.numel() // rows
    tiles = RowTiles(*(grouped.pairs.new_empty(max_tiles) for _ in range(2)))
    num_experts = grouped.counts.numel()
    if max_tiles:
        _tile_rows_kernel[(triton.cdiv(max_tiles, _TILES),)](
            *(grouped.counts, *tiles, num_experts, max_tiles),
            ROWS=rows,
            BLOCK_E=max(16, triton.next_power_of_2(num_experts)),
            TILES=_TILES,
            num_warps=8,
        )
    return tiles


@triton.jit
def _group_and_permute_kernel(
    topk_idx,
    is_member,
    num_pairs,
    num_experts,
    first_expert,
    pairs,
    active,
    offsets,
    counts,
    num_active,
    x,
    permuted,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    IN_K_ORDER: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first program groups all pairs, the others permute columns."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program > 0:
        _permute(program - 1, x, permuted, HIDDEN, COLUMNS, IN_K_ORDER)
    else:
        pair = tl.arange(0, BLOCK_P)
        key = _key(topk_idx, is_member, pair, num_pairs, num_experts, first_expert, BLOCK_E - 1)
        place = tl.zeros([BLOCK_P], tl.int32)
        for start in range(0, num_pairs, CHUNK):
            other = start + tl.arange(0, CHUNK)
            other_key = _key(topk_idx, is_member, other, num_pairs, num_experts, first_expert, BLOCK_E - 1)
            is_before = (other_key[None, :] < key[:, None]) | (
                (other_key[None, :] == key[:, None]) & (other[None, :] < pair[:, None])
            )
            place += tl.sum(is_before.to(tl.int32), axis=1)
        tl.store(pairs + place, pair, mask=key < num_experts)
        expert = tl.arange(0, BLOCK_E)
        count = tl.where(expert < num_experts, tl.histogram(key, BLOCK_E), 0)
        tl.store(counts + expert, count, mask=expert < num_experts)
        _store_experts(count, offsets, active, num_experts, num_active, BLOCK_E)


@triton.jit
def _permute_kernel(x, permuted, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, IN_K_ORDER: tl.constexpr):
    _permute(tl.program_id(0), x, permuted, HIDDEN, COLUMNS, IN_K_ORDER)


@triton.jit
def _permute(part, x, permuted, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, IN_K_ORDER: tl.constexpr):
    """Permute some columns of a row."""
    parts: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    place = part % parts * COLUMNS + tl.arange(0, COLUMNS)
    row = (part // parts).to(tl.int64) * HIDDEN
    values = tl.load(x + row + _column_at(place, HIDDEN, IN_K_ORDER), mask=place < HIDDEN)
    tl.store(permuted + row + place, values, mask=place < HIDDEN)


@triton.jit
def _count_pairs_kernel(
    topk_idx,
    is_member,
    num_pairs,
    num_experts,
    first_expert,
    block_counts,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """How many pairs of a block every expert has."""
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    key = _key(topk_idx, is_member, pair, num_pairs, num_experts, first_expert, BLOCK_E - 1)
    expert = tl.arange(0, BLOCK_E)
    at = block_counts + tl.program_id(0) * num_experts + expert
    tl.store(at, tl.histogram(key, BLOCK_E), mask=expert < num_experts)


@triton.jit
def _store_experts(count, offsets, active, num_experts, num_active, BLOCK_E: tl.constexpr):
    """`offsets` and `active` of GroupedRows for the counts of all experts."""
    expert = tl.arange(0, BLOCK_E)
    tl.store(offsets + expert, tl.cumsum(count, axis=0) - count, mask=expert < num_experts)
    has_rows = (count > 0).to(tl.int32)
    tl.store(active + tl.cumsum(has_rows, axis=0) - 1, expert, mask=count > 0)
    rest = (expert >= tl.sum(has_rows, axis=0)) & (expert < num_active)
    tl.store(active + expert, tl.full([BLOCK_E], -1, tl.int32), mask=rest)


@triton.jit
def _sum_blocks_kernel(
    block_counts, counts, num_experts, num_blocks, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Replace a block's count of an expert by that of all blocks before it."""
    block = tl.arange(0, BLOCKS)[:, None]
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    at = block_counts + block * num_experts + expert[None, :]
    mask = (block < num_blocks) & (expert[None, :] < num_experts)
    count = tl.load(at, mask=mask, other=0)
    tl.store(at, tl.cumsum(count, axis=0) - count, mask=mask)
    tl.store(counts + expert, tl.sum(count, axis=0), mask=expert < num_experts)


@triton.jit
def _sum_experts_kernel(counts, offsets, active, num_experts, num_active, BLOCK_E: tl.constexpr):
    expert = tl.arange(0, BLOCK_E)
    count = tl.load(counts + expert, mask=expert < num_experts, other=0)
    _store_experts(count, offsets, active, num_experts, num_active, BLOCK_E)


@triton.jit
def _place_pairs_kernel(
    topk_idx,
    is_member,
    num_pairs,
    num_experts,
    first_expert,
    pairs,
    offsets,
    block_offsets,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write a block's pairs behind those of the experts and the blocks before."""
    begin = tl.program_id(0) * BLOCK_P
    pair = begin + tl.arange(0, BLOCK_P)
    key = _key(topk_idx, is_member, pair, num_pairs, num_experts, first_expert, BLOCK_E - 1)
    rank = tl.zeros([BLOCK_P], tl.int32)
    for start in range(0, BLOCK_P, CHUNK):
        other = begin + start + tl.arange(0, CHUNK)
        other_key = _key(topk_idx, is_member, other, num_pairs, num_experts, first_expert, BLOCK_E - 1)
        is_before = (other_key[None, :] == key[:, None]) & (other[None, :] < pair[:, None])
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    is_local = key < num_experts
    place = tl.load(offsets + key, mask=is_local, other=0)
    place += tl.load(block_offsets + tl.program_id(0) * num_experts + key, mask=is_local, other=0)
    tl.store(pairs + place + rank, pair, mask=is_local)


@triton.jit
def _tile_rows_kernel(
    counts,
    tile_experts,
    tile_starts,
    num_experts,
    max_tiles,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TILES: tl.constexpr,
):
    expert = tl.arange(0, BLOCK_E)
    count = tl.load(counts + expert, mask=expert < num_experts, other=0)
    ends = tl.cumsum((count + ROWS - 1) // ROWS, axis=0)[None, :]
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    is_past = ends <= tile[:, None]
    owner = tl.sum(is_past.to(tl.int32), axis=1)
    first = tl.max(tl.where(is_past, ends, 0), axis=1)
    tl.store(tile_experts + tile, tl.where(owner < num_experts, owner, -1), mask=tile < max_tiles)
    tl.store(tile_starts + tile, (tile - first) * ROWS, mask=tile < max_tiles)


@triton.jit
def _column_at(place, NUM_COLUMNS: tl.constexpr, IN_K_ORDER: tl.constexpr):
    """Which column stands at a place; the inverse of the orders in `kernels.expert_tiles`."""
    if IN_K_ORDER:
        quarter = place % 8 // 2
        code = place % 2 * 4 + place % 32 // 16 * 2 + place % 16 // 8
    else:
        quarter = place % 32 // 8
        code = place % 2 * 4 + place % 8 // 2
    wide = place // 128 * 128 + quarter * 32 + place % 128 // 32 * 8 + code
    narrow = place // 32 * 32 + quarter * 8 + code
    return tl.where(place < NUM_COLUMNS // 128 * 128, wide, narrow)


@triton.jit
def _key(topk_idx, is_member, pair, num_pairs, num_experts, first_expert, NOT_HERE: tl.constexpr):
    """Local expert of each pair; `NOT_HERE`, which no expert has, if another rank's or not wanted."""
    local = tl.load(topk_idx + pair, mask=pair < num_pairs, other=-1) - first_expert
    is_local = (pair < num_pairs) & (local >= 0) & (local < num_experts)
    if is_member is not None:
        is_local = is_local & (tl.load(is_member + local, mask=is_local, other=0) != 0)
    return tl.where(is_local, local, NOT_HERE).to(tl.int32)


def combine(parts: Tensor, topk_idx: Tensor, experts: range) -> Tensor:
    """Sum a rank's outputs over the choices from left to right.

    Args:
        parts: `[num_tokens, num_topk, hidden]` bf16, contiguous; read only where the choice is one of `experts`.
        topk_idx: `[num_tokens, num_topk]` int64, contiguous, global expert ids.
        experts: global ids of the local experts.
    Returns: `[num_tokens, hidden]` float32; zero for a token without a local expert.
    """
    num_tokens, num_topk, hidden = parts.shape
    out = parts.new_empty(num_tokens, hidden, dtype=torch.float32)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(hidden, _COLUMNS))
        _combine_kernel[grid](
            *(parts, topk_idx, out, hidden, experts.start, experts.stop),
            NUM_TOPK=num_topk,
            COLUMNS=_COLUMNS,
            OVERLAP=_overlaps_launches(parts.device),
            launch_pdl=_overlaps_launches(parts.device),
            num_warps=4,
        )
    return out


def _overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends: compute capability 9.0 has it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _combine_kernel(
    parts,
    topk_idx,
    out,
    hidden,
    first_expert,
    end_expert,
    NUM_TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(NUM_TOPK):
        expert = tl.load(topk_idx + token * NUM_TOPK + choice)
        is_local = (expert >= first_expert) & (expert < end_expert)
        end = tl.where(is_local, hidden, 0)
        total += tl.load(parts + (token * NUM_TOPK + choice) * hidden + column, mask=column < end, other=0.0)
    tl.store(out + token * hidden + column, total, mask=column < hidden)
