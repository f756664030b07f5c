"""Index scores, candidate pool and top-k selection. Source: `spec/model.md` sections 4.4 and 4.5.

Every choice breaks ties towards the lower index, by stable sorting.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.reference.quantize import quantize_q4u, unpack_q4u
from kernels.reference.rope import apply_rope
from kernels.row_tiles import split_rows
from kernels.tensors import QuantizedRows, QueryRows


def index_queries(projected: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotated queries in Q4u.

    Args:
        projected: `[num_rows, num_heads, n]` bf16.
        positions: `[num_rows]` int64.
        frequencies: `[rope_dim // 2]` float32 or float64.
    Returns: `[num_rows, num_heads, n]` bf16.
    """
    return quantize_q4u(apply_rope(projected, positions, frequencies))


def select_entries(
    q: Tensor,
    head_weights: Tensor,
    keys: QuantizedRows,
    rows: QueryRows,
    block_table: Tensor,
    *,
    ratio: int,
    entries_per_block: int,
    num_topk: int,
    pool_block: int,
    pool: Tensor | None,
    make_pool: int | None,
    max_entries: int,
    accumulate: torch.dtype,
    round_bf16: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The entries that each row attends to.

    Args:
        q: `[num_rows, num_heads, n]` bf16, from `index_queries`.
        head_weights: `[num_rows, num_heads]` bf16, scaled.
        keys: index keys, Q4u, in blocks of `entries_per_block`.
        rows: the rows; a padding row chooses nothing.
        block_table: `[num_sequences, max_blocks]` int64.
        ratio: tokens an entry.
        entries_per_block: entries of a block of the cache.
        num_topk: entries that a row chooses.
        pool_block: entries of a candidate block.
        pool: candidate blocks, as returned; only their entries may be chosen. None: all visible ones.
        make_pool: candidate blocks to return, chosen from all visible entries; None for no pool.
        max_entries: no row sees more.
        accumulate: float32 or float64.
        round_bf16: see `index_scores`.
    Returns: `[num_rows, num_topk]` int32, cache rows of the best visible entries, oldest first, then -1; and
        `[num_rows, make_pool]` int32, numbers of candidate blocks, ascending, then -1.
    """
    num_rows = q.shape[0]
    entry_rows = torch.full((num_rows, num_topk), -1, dtype=torch.int32, device=q.device)
    made = None
    if make_pool is not None:
        made = torch.full((num_rows, make_pool), -1, dtype=torch.int32, device=q.device)
    num_visible = (rows.positions + 1) // ratio
    for begin, end in _runs(rows):
        sequence = int(rows.sequence[begin])
        num_entries = int(num_visible[begin:end].max())
        assert num_entries <= max_entries, f"{num_entries=} {max_entries=}"
        if num_entries == 0:
            continue
        places = torch.arange(num_entries, device=q.device)
        places = (
            block_table[sequence, places // entries_per_block] * entries_per_block
            + places % entries_per_block
        )
        values = unpack_q4u(QuantizedRows(*(t[places] for t in keys)))
        for tile in split_rows(begin, end, index_row_bytes(q.shape[1], num_entries, accumulate)):
            scores = index_scores(
                q[tile],
                values,
                head_weights[tile],
                num_visible[tile],
                round_bf16=round_bf16,
                accumulate=accumulate,
            )
            if made is not None and make_pool is not None:
                made[tile] = _listed(
                    candidate_pool(scores, num_visible[tile], pool_block, make_pool), make_pool
                )
            elif pool is not None:
                is_candidate = _flags(pool[tile], -(-num_entries // pool_block))
                scores = mask_outside_pool(scores, is_candidate, pool_block)
            picks = best_entries(scores, num_topk)
            entry_rows[tile] = torch.where(picks >= 0, places[picks.clamp_min(0)], -1).to(torch.int32)
    return entry_rows, made


def _runs(rows: QueryRows) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows of one sequence, padding left out."""
    place = torch.where(rows.positions < 0, -1, rows.sequence)
    begin = 0
    values, counts = torch.unique_consecutive(place, return_counts=True)
    for sequence, count in zip(values.tolist(), counts.tolist(), strict=True):
        if sequence >= 0:
            yield begin, begin + count
        begin += count


def _listed(is_kept: Tensor, num_blocks: int) -> Tensor:
    """Numbers of the kept blocks, ascending, then -1: `[num_rows, n]` bool to `[num_rows, num_blocks]` int32."""
    numbers = torch.arange(is_kept.shape[1], dtype=torch.int32, device=is_kept.device)
    missing = torch.iinfo(torch.int32).max
    ordered = torch.where(is_kept, numbers, missing).sort(dim=1).values[:, :num_blocks]
    ordered = torch.nn.functional.pad(ordered, (0, num_blocks - ordered.shape[1]), value=missing)
    return torch.where(ordered == missing, -1, ordered)


def _flags(numbers: Tensor, num_blocks: int) -> Tensor:
    """Inverse of `_listed`: `[num_rows, n]` int32 to `[num_rows, num_blocks]` bool."""
    flags = torch.zeros(numbers.shape[0], num_blocks + 1, dtype=torch.bool, device=numbers.device)
    place = torch.where((numbers >= 0) & (numbers < num_blocks), numbers, num_blocks)
    return flags.scatter_(1, place.to(torch.int64), True)[:, :num_blocks]


def index_scores(
    q: Tensor,
    keys: Tensor,
    head_weights: Tensor,
    num_visible: Tensor,
    *,
    round_bf16: bool,
    accumulate: torch.dtype,
) -> Tensor:
    """`sum_h relu(q_h . key_j) * w_h` for every entry, -inf where the entry is not visible.

    Args:
        q: `[num_rows, num_heads, n]` bf16, fake-quantised.
        keys: `[num_entries, n]` bf16, fake-quantised.
        head_weights: `[num_rows, num_heads]` bf16, scaled.
        num_visible: `[num_rows]` int64; entries `0 .. num_visible - 1` may be seen.
        round_bf16: round the dot products, the weighted heads and their sum to BF16 as the reference
            implementation does; otherwise only the accumulation type rounds.
        accumulate: float32 or float64.
    Returns: `[num_rows, num_entries]`, `accumulate`.
    """
    # One product per row. Its kernel depends on the number of entries, its result does not: sums of fake-quantised
    # products are exact.
    dots = torch.bmm(q.to(accumulate), keys.to(accumulate).T.expand(q.shape[0], -1, -1))
    dots = _round(dots, round_bf16)  # [num_rows, num_heads, num_entries]
    weighted = _round(dots.relu() * head_weights.to(accumulate).unsqueeze(-1), round_bf16)
    scores = weighted[:, 0]
    for head in weighted.unbind(1)[1:]:  # `sum` would add in an order that depends on the number of entries
        scores = scores + head
    scores = _round(scores, round_bf16)
    entry = torch.arange(keys.shape[0], device=keys.device)
    return scores.masked_fill(entry >= num_visible.unsqueeze(-1), -torch.inf)


def index_row_bytes(num_heads: int, num_entries: int, accumulate: torch.dtype) -> int:
    """Memory that `index_scores` and the choice from its result need for a row, not counting its arguments."""
    # Products, weighted heads, their BF16 and rounded values; then a row's scores, sorted, with their places.
    return 4 * num_heads * num_entries * accumulate.itemsize


def _round(x: Tensor, round_bf16: bool) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype) if round_bf16 else x


def candidate_pool(scores: Tensor, num_visible: Tensor, block_size: int, num_topk: int) -> Tensor:
    """Blocks of entries that later index layers may choose from: the best and always the newest visible one.

    Args:
        scores: `[num_rows, num_entries]` float, -inf where not visible.
        num_visible: `[num_rows]` int64, at least 1.
        block_size: entries per block.
        num_topk: blocks kept, the pinned newest one included.
    Returns: `[num_rows, num_blocks]` bool, with the last block, which may be partial.
    """
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % block_size), value=-torch.inf)
    block_scores = padded.unflatten(-1, (-1, block_size)).amax(dim=-1)
    newest = ((num_visible - 1) // block_size).unsqueeze(-1)
    block_scores = block_scores.scatter(1, newest, torch.inf)
    order = torch.sort(block_scores, dim=-1, descending=True, stable=True).indices[:, :num_topk]
    kept = torch.zeros_like(block_scores, dtype=torch.bool).scatter(1, order, True)
    return kept & (block_scores != -torch.inf)


def mask_outside_pool(scores: Tensor, pool: Tensor, block_size: int) -> Tensor:
    """Scores with -inf at entries outside the pool.

    Args:
        scores: `[num_rows, num_entries]` float.
        pool: `[num_rows, num_blocks]` bool, see `candidate_pool`.
        block_size: entries per block.
    Returns: like `scores`.
    """
    is_inside = pool.repeat_interleave(block_size, dim=1)[:, : scores.shape[1]]
    return scores.masked_fill(~is_inside, -torch.inf)


def best_entries(scores: Tensor, num_topk: int) -> Tensor:
    """The `num_topk` best entries of each row, ascending by index, then -1 where fewer are visible.

    Args:
        scores: `[num_rows, num_entries]` float, -inf where an entry may not be chosen.
        num_topk: list length.
    Returns: `[num_rows, num_topk]` int64.
    """
    num_entries = scores.shape[1]
    best, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    chosen = order[:, :num_topk].masked_fill(best[:, :num_topk] == -torch.inf, num_entries)
    chosen = chosen.sort(dim=-1).values
    chosen = torch.nn.functional.pad(chosen, (0, num_topk - chosen.shape[1]), value=num_entries)
    return chosen.masked_fill(chosen == num_entries, -1)
