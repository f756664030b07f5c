"""KV caches of one shard: compressed entries, index keys, window rings and half-group state.

Values are stored as the codes and scales that the model rounds them to (`spec/model.md` section 10), so reading them
back is exact. A zero byte is a finite code and a finite scale everywhere. Blocks
belong to sequences through block tables that the scheduler owns; rings belong to state slots. Nothing here is ever
cleared: what a sequence may read follows from positions alone, so a slot or block needs no preparation for its next
owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.tensors import QuantizedRows
from model.config import ModelConfig
from model.kv_layout import CacheShapes, PackedLayout, entry_layout, index_key_layout, window_layout

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8, "ue8m0": torch.uint8}


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
        windows: per layer, drafts after the backbone, `num_slots * window_ring_size` keys of `head_dim` in Q8; position
            `p` of slot `s` lies in row `s * ring + p % ring`.
        entries: per KV source layer, `num_blocks * entries_per_block` entries of `head_dim` in Q4n.
        index_keys: per KV source layer, `num_blocks * entries_per_block` keys of `index_head_dim` in Q4u.
        halves: per ratio-2 source layer, `[num_slots * half_ring_size, 2, head_dim]` in the accumulation type: the
            compressor's value and gate of the last tokens.
    """

    def __init__(
        self, config: ModelConfig, geometry: CacheGeometry, accumulate: torch.dtype, device: torch.device
    ) -> None:
        self.geometry = geometry
        shapes = CacheShapes.of(config, geometry.num_slots, geometry.num_blocks, geometry.block_size)

        def rows(layout: PackedLayout, num_rows: int) -> QuantizedRows:
            return QuantizedRows(
                *(
                    torch.zeros(num_rows, num_bytes, dtype=torch.uint8, device=device).view(dtype)
                    for num_bytes, dtype in (
                        (layout.codes_bytes, _DTYPES[layout.codes]),
                        (layout.scales_bytes, _DTYPES[layout.scales]),
                    )
                )
            )

        num_layers, num_rows, width = shapes.windows
        self.windows = [rows(window_layout(width), num_rows) for _ in range(num_layers)]
        self.entries = {layer: rows(entry_layout(width), n) for layer, (n, width) in shapes.entries.items()}
        self.index_keys = {
            layer: rows(index_key_layout(width), n) for layer, (n, width) in shapes.index_keys.items()
        }
        self.halves = {
            layer: torch.zeros(shape, dtype=accumulate, device=device)
            for layer, shape in shapes.halves.items()
        }

    @property
    def num_bytes(self) -> int:
        """Memory of all caches."""
        packed = (*self.windows, *self.entries.values(), *self.index_keys.values())
        return sum(t.nbytes for t in (*(t for rows in packed for t in rows), *self.halves.values()))
