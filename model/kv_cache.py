"""KV caches of one shard: compressed entries, index keys, window rings and half-group state.

Values are stored as the model rounds them (`spec/model.md` section 10), so reading them back is exact. Blocks
belong to sequences through block tables that the scheduler owns; rings belong to state slots. Nothing here is ever
cleared: what a sequence may read follows from positions alone, so a slot or block needs no preparation for its next
owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelConfig
from model.kv_layout import CacheShapes


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Sizes of the caches, equal on all ranks."""

    num_slots: int
    """Sequences that can be running at once."""
    num_blocks: int
    """KV blocks, shared by all sequences."""
    block_size: int
    """Tokens per block; even, so that ratio-2 groups never straddle blocks."""

    def entries_per_block(self, ratio: int) -> int:
        """Compressed entries of one block at a compression ratio of 1 or 2."""
        return self.block_size // ratio

    def entry_idx(self, block_table: Tensor, sequence: Tensor, entries: Tensor, ratio: int) -> Tensor:
        """Cache rows of compressed entries.

        Args:
            block_table: `[num_sequences, max_blocks]` int64.
            sequence: rows of the table, int64; broadcasts with `entries`.
            entries: numbers of the entries within their sequence, int64.
            ratio: compression ratio.
        Returns: int64, of the broadcast shape.
        """
        per_block = self.entries_per_block(ratio)
        return block_table[sequence, entries // per_block] * per_block + entries % per_block


class KvCaches:
    """All cache tensors of one rank (one KV head: every rank holds the same).

    Attributes:
        windows: `[num_layers_with_drafts, num_slots * window_ring_size, head_dim]` bf16; position `p` of slot `s` lies
            in row `s * ring + p % ring`.
        entries: per KV source layer, `[num_blocks * entries_per_block, head_dim]` bf16.
        index_keys: per KV source layer, `[num_blocks * entries_per_block, index_head_dim]` bf16.
        halves: per ratio-2 source layer, `[num_slots * half_ring_size, 2, head_dim]` in the accumulation type: the
            compressor's value and gate of the last tokens.
    """

    def __init__(
        self, config: ModelConfig, geometry: CacheGeometry, accumulate: torch.dtype, device: torch.device
    ) -> None:
        self.geometry = geometry
        shapes = CacheShapes.of(config, geometry.num_slots, geometry.num_blocks, geometry.block_size)

        def zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.windows = zeros(shapes.windows)
        self.entries = {layer: zeros(shape) for layer, shape in shapes.entries.items()}
        self.index_keys = {layer: zeros(shape) for layer, shape in shapes.index_keys.items()}
        self.halves = {layer: zeros(shape, accumulate) for layer, shape in shapes.halves.items()}

    def read_index_keys(self, layer: int, ratio: int, block_table: Tensor, num_entries: int) -> Tensor:
        """First index keys of one sequence.

        Args:
            layer: KV source.
            ratio: its compression ratio.
            block_table: `[max_blocks]` int64, the sequence's.
            num_entries: how many.
        Returns: `[num_entries, index_head_dim]` bf16.
        """
        per_block = self.geometry.entries_per_block(ratio)
        blocks = block_table[: -(-num_entries // per_block)]
        return self.index_keys[layer].unflatten(0, (-1, per_block))[blocks].flatten(0, 1)[:num_entries]

    @property
    def num_bytes(self) -> int:
        """Memory of all caches."""
        caches = [self.windows, *self.entries.values(), *self.index_keys.values(), *self.halves.values()]
        return sum(cache.numel() * cache.element_size() for cache in caches)
