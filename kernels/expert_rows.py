"""Rows of the expert product: grouped by expert, activations in the order it reads, its outputs summed. Triton.

The product takes eight e2m1 codes out of each 32-bit word of a page, so it wants the activations of the first
codes of all words side by side, then those of the second codes, and so on. That order is *planes*: column `c` of
`n` stands at `c % 8 * (n // 8) + c // 8`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PAIRS_IN_ONE_PROGRAM = 512
"""Above this the grouping compares too many pairs with each other and a sort is used."""
_COLUMNS = 1024
_PAIRS = 16


class GroupedRows(NamedTuple):
    """The (token, choice) pairs of local experts, sorted by expert; a pair is `token * num_topk + choice`."""

    pairs: Tensor
    """`[num_pairs]` int32: sorted by expert, then by pair; those of other ranks' experts come last."""
    active: Tensor
    """`[min(num_experts, num_pairs)]` int32: experts that have rows, ascending, then -1."""
    offsets: Tensor
    """`[num_experts]` int32: where an expert's rows begin in `pairs`."""
    counts: Tensor
    """`[num_experts]` int32."""


def group_rows(
    x: Tensor, topk_idx: Tensor, is_wanted: Tensor, first_expert: int
) -> tuple[GroupedRows, Tensor]:
    """Group the rows by expert and put `x` in planes; no host synchronisation.

    Args:
        x: `[num_tokens, hidden]` bf16, contiguous, `hidden` a multiple of 32.
        topk_idx: `[num_tokens, num_topk]` int64, contiguous, global expert ids.
        is_wanted: `[num_experts]` bool: which local experts take part.
        first_expert: global id of local expert 0.
    Returns: the groups and `[num_tokens, hidden]` bf16, `x` in planes.
    """
    num_pairs, num_experts = topk_idx.numel(), is_wanted.numel()
    planes = torch.empty_like(x)
    pairs, active, offsets, counts = (
        torch.empty(size, dtype=torch.int32, device=x.device)
        for size in (num_pairs, min(num_experts, num_pairs), num_experts, num_experts)
    )
    grouped = GroupedRows(pairs, active, offsets, counts)
    if num_pairs == 0:
        counts.zero_()
        return grouped, planes
    is_small = num_pairs <= MAX_PAIRS_IN_ONE_PROGRAM
    grid = (x.shape[0] * triton.cdiv(x.shape[1], _COLUMNS) + is_small,)
    _group_rows_kernel[grid](
        x,
        topk_idx,
        is_wanted,
        *(planes, pairs, active, offsets, counts),
        *(num_pairs, num_experts, active.numel(), first_expert),
        HIDDEN=x.shape[1],
        COLUMNS=_COLUMNS,
        GROUP=is_small,
        BLOCK_P=max(16, triton.next_power_of_2(num_pairs)) if is_small else 16,
        BLOCK_E=max(16, triton.next_power_of_2(num_experts)),
        CHUNK=_PAIRS,
        num_warps=8,
    )
    if not is_small:
        _sort_rows(grouped, topk_idx, is_wanted, first_expert)
    return grouped, planes


def _sort_rows(grouped: GroupedRows, topk_idx: Tensor, is_wanted: Tensor, first_expert: int) -> None:
    """What `_group_rows_kernel` does, for any number of pairs."""
    num_experts = is_wanted.numel()
    local = topk_idx.flatten() - first_expert
    is_local = (local >= 0) & (local < num_experts)
    is_local &= is_wanted[local.clamp(0, num_experts - 1)]
    key = torch.where(is_local, local, num_experts)
    grouped.pairs.copy_(key.argsort(stable=True))
    ends = torch.searchsorted(
        key[grouped.pairs.long()], torch.arange(num_experts, device=key.device), right=True
    )
    counts = ends.diff(prepend=ends.new_zeros(1))
    grouped.counts.copy_(counts)
    grouped.offsets.copy_(ends - counts)
    experts = torch.arange(num_experts, device=key.device)
    experts = torch.where(counts > 0, experts, num_experts).sort().values
    experts = torch.where(experts < num_experts, experts, -1)
    grouped.active.copy_(experts[: grouped.active.numel()])


@triton.jit
def _group_rows_kernel(
    x,
    topk_idx,
    is_wanted,
    planes,
    pairs,
    active,
    offsets,
    counts,
    num_pairs,
    num_experts,
    num_active,
    first_expert,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    if GROUP:
        program -= 1
    if program >= 0:
        parts: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
        place = program % parts * COLUMNS + tl.arange(0, COLUMNS)
        column = place % (HIDDEN // 8) * 8 + place // (HIDDEN // 8)
        row = (program // parts).to(tl.int64) * HIDDEN
        values = tl.load(x + row + column, mask=place < HIDDEN)
        tl.store(planes + row + place, values, mask=place < HIDDEN)
    if GROUP and program < 0:
        expert = tl.arange(0, BLOCK_E)
        pair = tl.arange(0, BLOCK_P)
        key = _key(topk_idx, is_wanted, pair, num_pairs, num_experts, first_expert, BLOCK_E)
        place = tl.zeros([BLOCK_P], tl.int32)
        count = tl.zeros([BLOCK_E], tl.int32)
        for start in range(0, num_pairs, CHUNK):
            other = start + tl.arange(0, CHUNK)
            other_key = _key(topk_idx, is_wanted, other, num_pairs, num_experts, first_expert, BLOCK_E)
            is_before = (other_key[None, :] < key[:, None]) | (
                (other_key[None, :] == key[:, None]) & (other[None, :] < pair[:, None])
            )
            place += tl.sum(is_before.to(tl.int32), axis=1)
            count += tl.sum((other_key[None, :] == expert[:, None]).to(tl.int32), axis=1)
        tl.store(pairs + place, pair, mask=pair < num_pairs)
        in_table = expert < num_experts
        tl.store(counts + expert, count, mask=in_table)
        tl.store(offsets + expert, tl.cumsum(count, axis=0) - count, mask=in_table)
        has_rows = (count > 0).to(tl.int32)
        tl.store(active + tl.cumsum(has_rows, axis=0) - 1, expert, mask=count > 0)
        rest = (expert >= tl.sum(has_rows, axis=0)) & (expert < num_active)
        tl.store(active + expert, tl.full([BLOCK_E], -1, tl.int32), mask=rest)


@triton.jit
def _key(topk_idx, is_wanted, pair, num_pairs, num_experts, first_expert, NOT_HERE: tl.constexpr):
    """Local expert of each pair; `NOT_HERE`, which no expert has, if another rank's or not wanted."""
    local = tl.load(topk_idx + pair, mask=pair < num_pairs, other=-1) - first_expert
    is_local = (pair < num_pairs) & (local >= 0) & (local < num_experts)
    is_local = is_local & (tl.load(is_wanted + local, mask=is_local, other=0) != 0)
    return tl.where(is_local, local, NOT_HERE).to(tl.int32)


def combine(parts: Tensor) -> Tensor:
    """Sum over choices from left to right: `[num_tokens, num_topk, hidden]` to `[num_tokens, hidden]` float32."""
    num_tokens, num_topk, hidden = parts.shape
    out = parts.new_empty(num_tokens, hidden)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(hidden, _COLUMNS))
        _combine_kernel[grid](parts, out, hidden, NUM_TOPK=num_topk, COLUMNS=_COLUMNS, num_warps=8)
    return out


@triton.jit
def _combine_kernel(parts, out, hidden, NUM_TOPK: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < hidden
    total = tl.load(parts + token * NUM_TOPK * hidden + column, mask=mask)
    for choice in tl.static_range(1, NUM_TOPK):
        total += tl.load(parts + (token * NUM_TOPK + choice) * hidden + column, mask=mask)
    tl.store(out + token * hidden + column, total, mask=mask)
