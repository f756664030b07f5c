"""A configuration whose parts do not fit each other is refused, with the names and values that do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from model.config import CheckpointConfig, ModelConfig
from model.tiny import Variant, tiny_config

RELEASED_CONFIG = Path(__file__).parent.parent / "data" / "released_config.json"
VARIANTS: tuple[Variant, ...] = get_args(Variant)


def create_config(variant: Variant = "A", **changes: Any) -> ModelConfig:
    """A tiny variant's text model with some keys changed."""
    return ModelConfig.model_validate(tiny_config(variant)["text_config"] | changes)


def test_the_release_and_all_tiny_variants_are_accepted() -> None:
    release = CheckpointConfig.load(RELEASED_CONFIG).text_config
    assert (release.decoder_start_layer, release.num_layers_with_drafts) == (20, 43)
    assert [release.kv_source_of(layer) for layer in (2, 7, 8, 19, 39)] == [2, 2, 8, 14, 20]
    assert [release.index_source_of(layer) for layer in (2, 19, 23, 24, 39)] == [2, 14, 20, 24, 36]
    assert [create_config(variant).decoder_start_layer for variant in VARIANTS] == [
        9 if variant == "B" else 6 for variant in VARIANTS
    ]


RATIOS = [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0]


def ratios(**changes: int) -> list[int]:
    """Variant A's ratios with those of some layers changed: `ratios(layer3=1)`."""
    return [changes.get(f"layer{layer}", ratio) for layer, ratio in enumerate(RATIOS)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": RATIOS[:-1]}, "compress_ratios has 14 entries, but num_hidden_layers = 12 and"),
        (
            {"kv_source_layer_ids": [4, 2, 6]},
            "kv_source_layer_ids must ascend without repeats, got (4, 2, 6)",
        ),
        ({"engram_layer_ids": [1, 1]}, "engram_layer_ids must ascend without repeats, got (1, 1)"),
        ({"dspark_target_layer_ids": [9, 11, 10]}, "dspark_target_layer_ids must ascend"),
        (
            {"dspark_target_layer_ids": [10, 11, 12]},
            "dspark_target_layer_ids = (10, 11, 12) must lie in num_hidden_layers = 12",
        ),
        (
            {"engram_layer_ids": [-1, 4]},
            "engram_layer_ids = (-1, 4) must lie in num_hidden_layers = 12",
        ),
        (
            {"kv_source_layer_ids": [1, 2, 4, 6]},
            "kv_source_layer_ids has layer 1, whose entry in compress_ratios is 0",
        ),
        (
            {"index_source_layer_ids": [0, 2, 4, 6, 8, 10]},
            "index_source_layer_ids has layer 0, whose entry in compress_ratios is 0",
        ),
        (
            {"compress_ratios": ratios(layer1=2)},
            "compress_ratios[1] is 2, but kv_source_layer_ids = (2, 4, 6) has no layer up to 1",
        ),
        (
            {"index_source_layer_ids": [4, 6, 8, 10]},
            "compress_ratios[2] is 2, but index_source_layer_ids = (4, 6, 8, 10) has no layer up to 2",
        ),
        (
            {"compress_ratios": ratios(layer7=2)},
            "compress_ratios[7] is 2, but that layer reads compressed KV of layer 6 (kv_source_layer_ids), "
            "where it is 1",
        ),
        (
            {"index_source_layer_ids": [2, 6, 8, 10]},
            "layer 4 reads compressed KV of layer 4 (kv_source_layer_ids), but indices of layer 2",
        ),
        (
            {"kv_source_layer_ids": [], "index_source_layer_ids": [], "compress_ratios": [0] * 15},
            "kv_source_layer_ids is empty",
        ),
        (
            {"candidate_source_layer_id": 7},
            "candidate_source_layer_id = 7 is not in index_source_layer_ids = (2, 4, 6, 8, 10)",
        ),
        (
            {"candidate_source_layer_id": 4},
            "compress_ratios[4] is 2, but an index source from candidate_source_layer_id = 4 on must have 1",
        ),
        ({"engram_num_embeddings": [660]}, "engram_layer_ids = (1, 4) and engram_num_embeddings = (660,)"),
        ({"engram_layer_ids": [1, 6]}, "engram_layer_ids = (1, 6) must lie before layer 6"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids is empty"),
        (
            {"dspark_target_layer_ids": [5, 10, 11]},
            "dspark_target_layer_ids = (5, 10, 11) must not lie before layer 6, the last of kv_source_layer_ids",
        ),
        (
            {"compress_ratios": ratios(layer13=1)},
            "compress_ratios ends with (0, 1, 0) for num_nextn_predict_layers = 3",
        ),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than n_routed_experts = 8"),
        (
            {"dspark_num_experts_per_tok": 5},
            "dspark_num_experts_per_tok = 5 is more than dspark_n_routed_experts = 4",
        ),
        ({"qk_rope_head_dim": 66}, "qk_rope_head_dim = 66 is more than head_dim = 64"),
        ({"index_head_dim": 32, "qk_rope_head_dim": 34}, "= 34 is more than index_head_dim = 32"),
        ({"engram_compressed_vocab_size": 513}, "= 513 is more than vocab_size = 512"),
        ({"dspark_noise_token_id": 512}, "dspark_noise_token_id = 512 is no token of vocab_size = 512"),
        ({"engram_pad_token_id": -1}, "engram_pad_token_id = -1 is no token of vocab_size = 512"),
        *(
            ({name: 48}, f"{name} = 48 is not a multiple of 32")
            for name in ("hidden_size", "moe_intermediate_size", "head_dim", "index_head_dim", "q_lora_rank")
        ),
        ({"o_lora_rank": 48}, "o_lora_rank = 48 is not a multiple of 32"),
        ({"engram_head_dim": 48}, "engram_head_dim = 48 is not a multiple of 32"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim = 15 is odd"),
        ({"o_groups": 3}, "num_attention_heads = 4 is not a multiple of o_groups = 3"),
    ],
    ids=lambda value: None if isinstance(value, dict) else re.sub(r"[^\w =]", "", value)[:60],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        create_config(**changes)


@pytest.mark.parametrize("name", ["vocab_size", "sliding_window", "num_nextn_predict_layers", "rms_norm_eps"])
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name}\n.*greater than 0"):
        create_config(**{name: 0})


def test_an_ngram_has_a_token_before_its_last() -> None:
    with pytest.raises(ValidationError, match="engram_max_ngram_size\n.*greater than or equal to 2"):
        create_config(engram_max_ngram_size=1)


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"])
def test_special_tokens_are_in_the_vocabulary(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} = 512 is no token of vocab_size = 512"):
        CheckpointConfig.model_validate(tiny_config() | {name: 512})
