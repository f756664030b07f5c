"""Shapes of the KV caches, how a row is packed, and the bytes that they take. No torch.

Source: `spec/model.md` section 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from kernels.formats import MXFP4_GROUP, NVFP4_GROUP
from model.config import ModelConfig

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
    def of(cls, shapes: CacheShapes) -> CacheBytes:
        """Bytes of caches with these shapes; half-group state is float32."""
        *num_rows, width = shapes.windows
        return cls(
            windows=prod(num_rows) * window_layout(width).num_bytes,
            entries=sum(n * entry_layout(width).num_bytes for n, width in shapes.entries.values()),
            index_keys=sum(n * index_key_layout(width).num_bytes for n, width in shapes.index_keys.values()),
            halves=sum(prod(shape) * _FP32_BYTES for shape in shapes.halves.values()),
        )

    @property
    def total(self) -> int:
        """Of all caches."""
        return self.windows + self.entries + self.index_keys + self.halves


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """One row of a cache: codes, and a scale for each group of them."""

    codes: Literal["e4m3", "e2m1"]
    codes_bytes: int
    scales: Literal["e4m3", "ue8m0"]
    scales_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of a row."""
        return self.codes_bytes + self.scales_bytes


def window_layout(width: int) -> PackedLayout:
    """A window key (Q8)."""
    return PackedLayout("e4m3", width, "ue8m0", width // MXFP4_GROUP)


def entry_layout(width: int) -> PackedLayout:
    """A compressed entry (Q4n)."""
    return PackedLayout("e2m1", width // _E2M1_PER_BYTE, "e4m3", width // NVFP4_GROUP)


def index_key_layout(width: int) -> PackedLayout:
    """An index key (Q4u)."""
    return PackedLayout("e2m1", width // _E2M1_PER_BYTE, "ue8m0", width // MXFP4_GROUP)
