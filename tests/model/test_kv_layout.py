"""Bytes of the caches: the figures of spec section 10, and what the caches really take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.config import CheckpointConfig, ModelConfig
from model.kv_cache import CacheGeometry, KvCaches
from model.kv_layout import (
    CacheBytes,
    CacheFormat,
    CacheShapes,
    entry_bytes,
    half_ring_size,
    index_key_bytes,
    window_ring_size,
    window_row_bytes,
)
from model.tiny import tiny_config

RELEASED = CheckpointConfig.load(Path(__file__).parent.parent / "data" / "released_config.json").text_config


@pytest.mark.parametrize(
    ("cache_format", "row_bytes"), [("packed", (528, 288, 68)), ("bf16", (1024, 1024, 256))]
)
def test_rows_have_the_bytes_of_the_specification(
    cache_format: CacheFormat, row_bytes: tuple[int, int, int]
) -> None:
    assert row_bytes == (
        window_row_bytes(RELEASED.head_dim, cache_format),
        entry_bytes(RELEASED.head_dim, cache_format),
        index_key_bytes(RELEASED.index_head_dim, cache_format),
    )


@pytest.mark.parametrize(
    ("cache_format", "entries", "index_keys", "windows"),
    [("packed", 720, 170, 2_906_112), ("bf16", 2560, 640, 5_636_096)],
)
def test_a_token_and_a_sequence_take_the_bytes_of_the_specification(
    cache_format: CacheFormat, entries: int, index_keys: int, windows: int
) -> None:
    taken = CacheBytes.of(CacheShapes.of(RELEASED, num_slots=1, num_blocks=1000, block_size=32), cache_format)
    assert (taken.entries, taken.index_keys) == (32_000 * entries, 32_000 * index_keys)
    # The specification counts the window alone; the rings hold a verify's rows besides, k + 1 of them.
    assert window_ring_size(RELEASED) == 128 + 6
    assert taken.windows == windows * 134 // 128
    assert taken.halves == 3 * half_ring_size(RELEASED) * 4096
    assert taken.total == taken.entries + taken.index_keys + taken.windows + taken.halves


@pytest.mark.parametrize("model", [RELEASED, ModelConfig.model_validate(tiny_config()["text_config"])])
def test_the_caches_take_what_their_shapes_say(model: ModelConfig) -> None:
    geometry = CacheGeometry(num_slots=5, num_blocks=700, block_size=8)
    caches = KvCaches(model, geometry, torch.float32, torch.device("meta"))
    assert caches.num_bytes == CacheBytes.of(CacheShapes.of(model, 5, 700, 8), "bf16").total
