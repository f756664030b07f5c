"""Engram row ids: which rows of a hashed n-gram table a token reads. Source: `spec/model.md` section 7.3."""

from __future__ import annotations

import torch
from torch import Tensor


def map_lookback(token_ids: Tensor, token_map: Tensor, pad_token_id: int) -> Tensor:
    """Compressed ids of each token and the ones before it; behind a dead one everything is pad.

    Args:
        token_ids: `[num_tokens, ngram]` int64, the row's own token first, then the ones before it; negative
            where there is none: before the start of the sequence, or in an image.
        token_map: `[vocab_size]` int64, compressed id of every token.
        pad_token_id: the token that stands for a missing one; its compressed id is returned.
    Returns: `[num_tokens, ngram]` int64.
    """
    dead = (token_ids < 0).cumsum(dim=-1) > 0
    return token_map[torch.where(dead, pad_token_id, token_ids)]


def engram_row_ids(token_map_ids: Tensor, multipliers: Tensor, moduli: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of every token, one per n-gram length and head.

    Args:
        token_map_ids: `[num_tokens, ngram]` int64: compressed ids of the token and the ones before it, pad
            where there is none (`map_lookback`).
        multipliers: `[ngram]` int64, one per look-back; no product may exceed 63 bits.
        moduli: `[ngram - 1, heads]` int64: sizes of the hash tables for n = 2 .. ngram.
        offsets: `[ngram - 1, heads]` int64: first row of each hash table.
    Returns: `[num_tokens, (ngram - 1) * heads]` int64, n-major.
    """
    products = token_map_ids * multipliers
    mixed = products[:, 0]
    rows = []
    for n in range(2, multipliers.shape[0] + 1):
        mixed = mixed ^ products[:, n - 1]
        rows.append(mixed.unsqueeze(-1) % moduli[n - 2] + offsets[n - 2])
    return torch.cat(rows, dim=-1)
