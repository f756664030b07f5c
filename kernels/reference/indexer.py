"""Index scores, candidate pool and top-k selection. Source: `spec/model.md` sections 4.4 and 4.5.

Every choice breaks ties towards the lower index, by stable sorting.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def select_entries(scores: Tensor, num_topk: int) -> Tensor:
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
