"""Builders of small models, profiles and plans."""

from __future__ import annotations

from typing import Any

from model.config import ModelConfig
from model.tiny import tiny_config
from placement.engine_plan import EnginePlan, ExpertLayout
from placement.plan import create_plan
from placement.profile import VERSION, PhaseProfile, Profile

SMALL = {
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [1, 1, 0],
    "kv_source_layer_ids": [0],
    "index_source_layer_ids": [0],
    "candidate_source_layer_id": 0,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "dspark_target_layer_ids": [1],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 1,
}
"""Two layers and a draft, four experts each."""


def create_model(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(tiny_config()["text_config"] | SMALL | changes)


def create_profile(*counts: list[int], labels: dict[str, int] | None = None) -> Profile:
    """Counted in decode, label `code` unless `labels` says otherwise."""
    decode = PhaseProfile(num_tokens=10, counts=tuple(map(tuple, counts)))
    prefill = PhaseProfile(num_tokens=0, counts=tuple((0,) * len(row) for row in counts))
    return Profile(VERSION, "m", labels or {"code": 10}, prefill, decode)


SMALL_COUNTS = ([5, 5, 9, 1], [1, 8, 6, 5], [1, 1, 1, 1])
"""A row chooses the experts with chances 0.5, 0.5, 0.9, 0.1; 0.1, 0.8, 0.6, 0.5; and 0.25 each."""


def create_small_plan(**options: Any) -> EnginePlan:
    """Three hot pages and a staging slot on each of four ranks in two expert groups."""
    layout = ExpertLayout.of(create_model(), 4, 2)
    settings = {"arm": "static", "budget_bytes": 4 * layout.page_bytes, "num_staging_slots": 1} | options
    return create_plan(create_profile(*SMALL_COUNTS), create_model(), layout, **settings)
