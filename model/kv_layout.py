"""Shapes of the KV caches, and the bytes that they take. No torch. Source: `spec/model.md` section 10."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from kernels.formats import MXFP4_GROUP, NVFP4_GROUP
from model.config import ModelConfig

CacheFormat = Literal["bf16", "packed"]
"""`bf16`: values as the model rounds them, two bytes each: what `model.kv_cache` keeps. `packed`: codes and scales, as
the release stores them; the same values."""

_BF16_BYTES = 2
_FP32_BYTES = 4
_E2M1_PER_BYTE = 2


def window_ring_size(config: ModelConfig) -> int:
    """Rows of a window ring: the window, and the rows of one verify that may be rejected and overwritten."""
    return config.sliding_window + config.dspark_block_size + 1


def half_ring_size(config: ModelConfig) -> int:
    """Tokens whose compressor inputs are kept so that a rejected verify can resume inside a group."""
    return config.dspark_block_size + 2


@dataclass(frozen=True, slots=True)
class CacheShapes:
    """Shapes of all caches of a rank; every rank has the same (one KV head)."""

    windows: tuple[int, int, int]
    """`[num_layers_with_drafts, num_slots * window_ring_size, head_dim]`."""
    entries: dict[int, tuple[int, int]]
    """By KV source layer: `[num_blocks * entries_per_block, head_dim]`."""
    index_keys: dict[int, tuple[int, int]]
    """By KV source layer: `[num_blocks * entries_per_block, index_head_dim]`."""
    halves: dict[int, tuple[int, int, int]]
    """By ratio-2 source layer: `[num_slots * half_ring_size, 2, head_dim]`."""

    @classmethod
    def of(cls, config: ModelConfig, num_slots: int, num_blocks: int, block_size: int) -> CacheShapes:
        """Shapes for so many sequences, and so many blocks of `block_size` tokens."""
        num_entries = {
            layer: num_blocks * (block_size // config.compress_ratios[layer])
            for layer in config.kv_source_layer_ids
        }
        return cls(
            windows=(
                config.num_layers_with_drafts,
                num_slots * window_ring_size(config),
                config.head_dim,
            ),
            entries={layer: (n, config.head_dim) for layer, n in num_entries.items()},
            index_keys={layer: (n, config.index_head_dim) for layer, n in num_entries.items()},
            halves={
                layer: (num_slots * half_ring_size(config), 2, config.head_dim)
                for layer in config.kv_source_layer_ids
                if config.compress_ratios[layer] == 2
            },
        )


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Bytes of a rank's caches."""

    windows: int
    entries: int
    index_keys: int
    halves: int

    @classmethod
    def of(cls, shapes: CacheShapes, cache_format: CacheFormat) -> CacheBytes:
        """Bytes of caches with these shapes; half-group state is float32 in either format."""
        *num_rows, width = shapes.windows
        return cls(
            windows=prod(num_rows) * window_row_bytes(width, cache_format),
            entries=sum(n * entry_bytes(width, cache_format) for n, width in shapes.entries.values()),
            index_keys=sum(
                n * index_key_bytes(width, cache_format) for n, width in shapes.index_keys.values()
            ),
            halves=sum(prod(shape) * _FP32_BYTES for shape in shapes.halves.values()),
        )

    @property
    def total(self) -> int:
        """Of all caches."""
        return self.windows + self.entries + self.index_keys + self.halves


def window_row_bytes(width: int, cache_format: CacheFormat) -> int:
    """Of one window key; packed: e4m3 with a ue8m0 scale for each 32 values."""
    return width * _BF16_BYTES if cache_format == "bf16" else width + width // MXFP4_GROUP


def entry_bytes(width: int, cache_format: CacheFormat) -> int:
    """Of one compressed entry; packed: e2m1 with an e4m3 scale for each 16 values."""
    return width * _BF16_BYTES if cache_format == "bf16" else width // _E2M1_PER_BYTE + width // NVFP4_GROUP


def index_key_bytes(width: int, cache_format: CacheFormat) -> int:
    """Of one index key; packed: e2m1 with a ue8m0 scale for each 32 values."""
    return width * _BF16_BYTES if cache_format == "bf16" else width // _E2M1_PER_BYTE + width // MXFP4_GROUP
