"""Bytes of the caches: the figures of spec section 10, and what the caches really take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.config import CheckpointConfig, ModelConfig
from model.kv_cache import CacheGeometry, KvCaches
from model.kv_layout import (
    CacheBytes,
    CacheShapes,
    entry_layout,
    half_ring_size,
    index_key_layout,
    window_layout,
    window_ring_size,
)
from model.tiny import tiny_config

RELEASED = CheckpointConfig.load(Path(__file__).parent.parent / "data" / "released_config.json").text_config


def test_rows_have_the_bytes_of_the_specification() -> None:
    layouts = window_layout(RELEASED.head_dim), entry_layout(RELEASED.head_dim)
    assert [layout.num_bytes for layout in layouts] == [528, 288]
    assert index_key_layout(RELEASED.index_head_dim).num_bytes == 68


def test_a_token_and_a_sequence_take_the_bytes_of_the_specification() -> None:
    taken = CacheBytes.of(CacheShapes.of(RELEASED, num_slots=1, num_blocks=1000, block_size=32))
    assert (taken.entries, taken.index_keys) == (32_000 * 720, 32_000 * 170)
    # The specification counts the window alone; the rings hold a verify's rows besides, k + 1 of them.
    assert window_ring_size(RELEASED) == 128 + 6
    assert taken.windows == 2_906_112 * 134 // 128
    assert taken.halves == 3 * half_ring_size(RELEASED) * 4096
    assert taken.total == taken.entries + taken.index_keys + taken.windows + taken.halves


@pytest.mark.parametrize("model", [RELEASED, ModelConfig.model_validate(tiny_config()["text_config"])])
def test_the_caches_take_what_their_shapes_say(model: ModelConfig) -> None:
    geometry = CacheGeometry(num_slots=5, num_blocks=700, block_size=8)
    caches = KvCaches(model, geometry, torch.float32, torch.device("meta"))
    assert caches.num_bytes == CacheBytes.of(CacheShapes.of(model, 5, 700, 8)).total
