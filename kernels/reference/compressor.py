"""The compressor: entries and index keys of the tokens that complete them. Source: `spec/model.md` section 4.3."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.linear import linear_bf16
from kernels.reference.norm import rms_norm
from kernels.reference.quantize import pack_q4n, pack_q4u
from kernels.reference.rope import apply_rope
from kernels.tensors import QuantizedRows, QueryRows


def write_entries(
    projected: Tensor,
    halves: Tensor | None,
    rows: QueryRows,
    first_new: Tensor,
    half_start: Tensor,
    entry_rows: Tensor,
    norm: Tensor,
    wk: Tensor,
    k_norm: Tensor,
    frequencies: Tensor,
    entries: QuantizedRows,
    index_keys: QuantizedRows,
    *,
    ratio: int,
    half_ring: int,
    norm_eps: float,
    accumulate: torch.dtype,
) -> None:
    """Write the entries that a step's tokens complete, and their index keys.

    Args:
        projected: `[num_rows, ratio * head_dim]` in `accumulate`: value; at ratio 2 value and gate.
        halves: ratio 2: `[num_slots * half_ring, 2, head_dim]` in `accumulate`: value and gate of earlier tokens.
        rows: all rows of the step, one sequence after the other.
        first_new: `[num_sequences]` int64: first position of each sequence in this step.
        half_start: `[num_sequences]` int64: first row of `halves` of each sequence; position `p` is in row
            `half_start + p % half_ring`.
        entry_rows: `[num_rows]` int64: row of `entries` and `index_keys` of the entry that a row completes, or -1.
        norm: `[head_dim]` bf16.
        wk: `[index_head_dim, head_dim]`.
        k_norm: `[index_head_dim]` bf16.
        frequencies: `[rope_dim // 2]` in `accumulate`.
        entries: Q4n.
        index_keys: Q4u.
        ratio: 1 or 2 tokens an entry.
        half_ring: tokens of a sequence in `halves`.
        norm_eps: RMS epsilon.
        accumulate: float32 or float64.
    """
    complete = (entry_rows >= 0).nonzero().squeeze(1)
    first_position = rows.positions[complete] - (ratio - 1)
    if ratio == 1:
        pooled = projected[complete].to(torch.bfloat16)
    else:
        assert halves is not None, "ratio 2 keeps the compressor's inputs"
        pairs = projected.unflatten(1, (2, -1))  # [num_rows, 2 (value, gate), head_dim]
        sequence = rows.sequence[complete]
        is_new = (first_position >= first_new[sequence]).view(-1, 1, 1)
        earlier = halves[half_start[sequence] + first_position % half_ring]
        first = torch.where(is_new, pairs[(complete - 1).clamp_min(0)], earlier)
        both = torch.stack((first, pairs[complete]), dim=1)  # [num_entries, 2 (token), 2, head_dim]
        pooled = pool_pairs(both[:, :, 0], both[:, :, 1])
    latent = rms_norm(pooled, norm, norm_eps, accumulate)
    key = rms_norm(linear_bf16(latent, wk, accumulate), k_norm, norm_eps, accumulate)
    key = apply_rope(key, first_position, frequencies)
    _scatter(pack_q4u(key), index_keys, entry_rows[complete])
    _scatter(pack_q4n(apply_rope(latent, first_position, frequencies)), entries, entry_rows[complete])


def keep_halves(projected: Tensor, halves: Tensor, half_rows: Tensor) -> None:
    """Keep the compressor's inputs of a step's last tokens; after `write_entries`, which may read what this replaces.

    Args:
        projected: `[num_rows, 2 * head_dim]`, value and gate.
        halves: see `write_entries`.
        half_rows: `[num_rows]` int64: row of `halves`; -1 for a token that is not kept.
    """
    kept = (half_rows >= 0).nonzero().squeeze(1)
    halves[half_rows[kept]] = projected[kept].unflatten(1, (2, -1))


def _scatter(new: QuantizedRows, cache: QuantizedRows, rows: Tensor) -> None:
    for values, cached in zip(new, cache, strict=True):
        cached.view(torch.uint8)[rows] = values.view(torch.uint8)


def pool_pairs(values: Tensor, gates: Tensor) -> Tensor:
    """Softmax-weighted mean of two tokens, channel by channel.

    Args:
        values: `[num_groups, 2, n]` float32 or float64, oldest token first.
        gates: same shape and dtype, logits.
    Returns: `[num_groups, n]` bf16.
    """
    return (torch.softmax(gates, dim=1) * values).sum(dim=1).to(torch.bfloat16)
