"""Sparse attention over window keys and selected entries with a sink. Source: `spec/model.md` section 4.2."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.quantize import unpack_q4n, unpack_q8
from kernels.reference.rope import apply_rope
from kernels.row_tiles import split_rows
from kernels.tensors import QuantizedRows, QueryRows, WindowPlaces

KEY_BLOCK = 64
"""List entries of one online-softmax block. Part of the numerics: probabilities are rounded to BF16 relative to the
running maximum of the blocks seen so far."""


def sparse_attention(
    q: Tensor, keys: Tensor, is_valid: Tensor, sinks: Tensor, scale: float, accumulate: torch.dtype
) -> Tensor:
    """Attention of each query over its own key list, K = V.

    Args:
        q: `[num_rows, num_heads, head_dim]` bf16.
        keys: `[num_rows, num_keys, head_dim]` bf16, in list order (window oldest first, then selected entries).
        is_valid: `[num_rows, num_keys]` bool; entries that are not count in the blocks but are never attended to.
        sinks: `[num_heads]` float32 logit of the sink, which takes probability and gives no value.
        scale: factor of `q . k`.
        accumulate: float32 or float64.
    Returns: `[num_rows, num_heads, head_dim]` bf16; zeros for a row without any valid key.
    """
    num_rows, num_heads, head_dim = q.shape
    # Selected, not multiplied: what lies in the place of a missing key may be anything, NaN included.
    values = keys.masked_fill(~is_valid.unsqueeze(-1), 0).to(accumulate)
    scores = torch.matmul(q.to(accumulate), values.transpose(1, 2)) * scale
    scores = scores.masked_fill(~is_valid.unsqueeze(1), -torch.inf)
    running_max = scores.new_full((num_rows, num_heads, 1), -1e30)
    total = scores.new_zeros((num_rows, num_heads, 1))
    out = scores.new_zeros((num_rows, num_heads, head_dim))
    for start in range(0, keys.shape[1], KEY_BLOCK):
        block, block_values = scores[:, :, start : start + KEY_BLOCK], values[:, start : start + KEY_BLOCK]
        new_max = torch.maximum(running_max, block.amax(dim=-1, keepdim=True))
        decay = torch.exp(running_max - new_max)
        p = torch.exp(block - new_max)
        total = total * decay + p.sum(dim=-1, keepdim=True)
        out = out * decay + torch.matmul(p.to(torch.bfloat16).to(accumulate), block_values)
        running_max = new_max
    total = total + torch.exp(sinks.to(accumulate).view(1, -1, 1) - running_max)
    return (out / total).to(torch.bfloat16)


def window_attention(
    q: Tensor,
    rows: QueryRows,
    places: WindowPlaces,
    new_keys: QuantizedRows,
    ring: QuantizedRows,
    *,
    ring_size: int,
    window: int,
    entries: QuantizedRows | None,
    entry_rows: Tensor | None,
    sinks: Tensor,
    frequencies: Tensor,
    scale: float,
    accumulate: torch.dtype,
) -> Tensor:
    """Attention of rotated queries over their window and selected entries, rotated back.

    Args:
        q: `[num_rows, num_heads, head_dim]` bf16, before the rotation.
        rows: the queries' places; a padding row sees nothing.
        places: where the window keys of a row's sequence are.
        new_keys: keys that this step computed, `[num_new_keys, head_dim]` Q8.
        ring: keys of earlier steps, `[num_slots * ring_size, head_dim]` Q8.
        ring_size: positions of a ring.
        window: keys of a window.
        entries: compressed entries, `[num_entries, head_dim]` Q4n; None for a layer that has none.
        entry_rows: `[num_rows, num_topk]` int32 rows of `entries`, -1 as filler.
        sinks: `[num_heads]` float32.
        frequencies: `[rope_dim // 2]` in `accumulate`.
        scale: factor of `q . k`.
        accumulate: float32 or float64.
    Returns: `[num_rows, num_heads, head_dim]` bf16.
    """
    num_keys = window + (0 if entry_rows is None else entry_rows.shape[1])
    rotated = apply_rope(q, rows.positions, frequencies)
    out = torch.empty_like(rotated)
    for tile in split_rows(0, len(q), attention_row_bytes(*q.shape[1:], num_keys, accumulate)):
        part = QueryRows(*(t[tile] for t in rows))
        keys, is_valid = _window_keys(part, places, new_keys, ring, ring_size, window)
        if entries is not None and entry_rows is not None:
            chosen = entry_rows[tile]
            keys = torch.cat((keys, unpack_q4n(_take(entries, chosen.clamp_min(0)))), dim=1)
            is_chosen = (chosen >= 0) & (part.positions >= 0).unsqueeze(1)
            is_valid = torch.cat((is_valid, is_chosen), dim=1)
        core = sparse_attention(rotated[tile], keys, is_valid, sinks, scale, accumulate)
        out[tile] = apply_rope(core, part.positions, frequencies, inverse=True)
    return out


def _window_keys(
    rows: QueryRows,
    places: WindowPlaces,
    new_keys: QuantizedRows,
    ring: QuantizedRows,
    ring_size: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Window keys of some rows, oldest first: `[num_rows, window, head_dim]` bf16 and which of them exist."""
    start, first_new, offset, floor = (t[rows.sequence].unsqueeze(1) for t in places)
    position = rows.positions.unsqueeze(1)
    key = position - torch.arange(window - 1, -1, -1, device=position.device)
    is_valid = (key >= floor.clamp_min(0)) & (position >= 0)
    is_new = key >= first_new
    new = _take(new_keys, torch.where(is_valid & is_new, key + offset, 0))
    cached = _take(ring, torch.where(is_valid & ~is_new, start + key % ring_size, 0))
    return torch.where(is_new.unsqueeze(-1), unpack_q8(new), unpack_q8(cached)), is_valid


def block_attention(
    q: Tensor,
    positions: Tensor,
    new_keys: QuantizedRows,
    ring: QuantizedRows,
    ring_rows: Tensor,
    *,
    sinks: Tensor,
    frequencies: Tensor,
    scale: float,
    accumulate: torch.dtype,
) -> Tensor:
    """Attention of a draft block: each row sees its sequence's committed window and the whole block (section 8.2).

    Args:
        q: `[num_sequences * block, num_heads, head_dim]` bf16, before the rotation.
        positions: `[num_sequences * block]` int64.
        new_keys: the block's keys, `[num_sequences * block, head_dim]` Q8.
        ring: committed keys, Q8.
        ring_rows: `[num_sequences, window]` int64 rows of `ring`, oldest first, -1 as filler.
        sinks: see `window_attention`.
        frequencies: see `window_attention`.
        scale: see `window_attention`.
        accumulate: float32 or float64.
    Returns: like `q`.
    """
    num_sequences = ring_rows.shape[0]
    block = q.shape[0] // num_sequences
    own = unpack_q8(new_keys).unflatten(0, (num_sequences, block))
    keys = torch.cat((unpack_q8(_take(ring, ring_rows.clamp_min(0))), own), dim=1)
    is_valid = torch.cat((ring_rows >= 0, ring_rows.new_ones(num_sequences, block, dtype=torch.bool)), dim=1)
    core = sparse_attention(
        apply_rope(q, positions, frequencies),
        keys.repeat_interleave(block, dim=0),
        is_valid.repeat_interleave(block, dim=0),
        sinks,
        scale,
        accumulate,
    )
    return apply_rope(core, positions, frequencies, inverse=True)


def keep_keys(new_keys: QuantizedRows, ring: QuantizedRows, ring_rows: Tensor) -> None:
    """Copy new keys to where later steps look for them.

    Args:
        new_keys: `[num_rows, head_dim]` Q8.
        ring: of the layer, Q8.
        ring_rows: `[num_rows]` int64: row of `ring` for each key; -1 for one that is not kept.
    """
    kept = (ring_rows >= 0).nonzero().squeeze(1)
    for new, cached in zip(new_keys, ring, strict=True):
        # As bytes, since not every torch scatters FP8.
        cached.view(torch.uint8)[ring_rows[kept]] = new.view(torch.uint8)[kept]


def _take(rows: QuantizedRows, index: Tensor) -> QuantizedRows:
    return QuantizedRows(*(t.view(torch.uint8)[index].view(t.dtype) for t in rows))


def attention_row_bytes(num_heads: int, head_dim: int, num_keys: int, accumulate: torch.dtype) -> int:
    """Memory that `sparse_attention` needs for a row, its gathered keys included."""
    # Keys as found in cache and step, masked, and in `accumulate`; scores, their exponentials, and results.
    key_bytes = num_keys * head_dim * (4 * torch.bfloat16.itemsize + accumulate.itemsize)
    return key_bytes + 3 * num_heads * (num_keys + head_dim) * accumulate.itemsize
