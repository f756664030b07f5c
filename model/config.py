"""ModelConfig: the checkpoint's `config.json`, typed, and the layer roles derived from it.

Source: `spec/model.md` section 1.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator


class ConfigError(ValueError):
    """A `config.json` that is missing, malformed or not of this model."""


class RopeScaling(BaseModel):
    """YaRN settings of the layers with a compression ratio (section 4.1)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rope_type: Literal["yarn"]
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


class QuantizationConfig(BaseModel):
    """How dense (FP8 tiles) and expert (MXFP4) weights are stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    quant_method: Literal["fp8"]
    activation_scheme: Literal["dynamic"]
    weight_block_size: tuple[Literal[32], Literal[32]]
    scale_fmt: Literal["ue8m0"]
    expert_dtype: Literal["fp4"]


class ModelConfig(BaseModel):
    """The language model's dimensions: `text_config` of the released `config.json`.

    Layers `0 .. num_hidden_layers - 1` are the backbone; layer ids from `num_hidden_layers` on are the
    DSpark draft stages `mtp.0 ..`, wherever one number names a layer (pages, compress_ratios).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: Literal["deepseek_v41_text"] = "deepseek_v41_text"
    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: Literal[1] = 1
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    hidden_act: Literal["silu"] = "silu"
    swiglu_limit: float
    rms_norm_eps: float
    attention_bias: Literal[False] = False
    tie_word_embeddings: Literal[False] = False
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    n_shared_experts: Literal[1] = 1
    num_experts_per_tok: int
    scoring_func: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: Literal[True] = True
    routed_scaling_factor: float
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_source_layer_ids: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    initializer_range: float = 0.02
    use_cache: bool = True
    compress_ratios: tuple[Literal[0, 1, 2], ...]

    @model_validator(mode="after")
    def _check_relations(self) -> ModelConfig:
        layers = self.num_hidden_layers + self.num_nextn_predict_layers
        if len(self.compress_ratios) != layers:
            raise ValueError(f"compress_ratios has {len(self.compress_ratios)} entries, expected {layers}")
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            ids = getattr(self, name)
            if list(ids) != sorted(set(ids)):
                raise ValueError(f"{name} must ascend without repeats, got {ids}")
        for layer in range(self.num_hidden_layers):
            if not self.compress_ratios[layer]:
                continue
            source = self.kv_source_of(layer)
            if self.compress_ratios[source] != self.compress_ratios[layer]:
                raise ValueError(
                    f"layer {layer} reads compressed KV of layer {source}, which has another ratio"
                )
            if self.index_source_of(layer) < source:
                raise ValueError(f"layer {layer} would reuse indices of another KV source than {source}")
        if len(self.engram_layer_ids) != len(self.engram_num_embeddings):
            raise ValueError("engram_layer_ids and engram_num_embeddings must have the same length")
        if any(layer >= self.decoder_start_layer for layer in self.engram_layer_ids):
            raise ValueError(
                f"engram layers {self.engram_layer_ids} must lie before layer {self.decoder_start_layer}"
            )
        return self

    def kv_source_of(self, layer: int) -> int:
        """Layer whose compressed KV and index keys `layer` reads: the latest KV source not after it."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source_of(self, layer: int) -> int:
        """Layer whose top-k list `layer` uses: the latest index source not after it."""
        return max(source for source in self.index_source_layer_ids if source <= layer)

    def num_experts_of(self, layer: int) -> int:
        """Routed experts of a backbone or draft layer."""
        return self.n_routed_experts if layer < self.num_hidden_layers else self.dspark_n_routed_experts

    def num_topk_of(self, layer: int) -> int:
        """Experts chosen per token in a backbone or draft layer."""
        return self.num_experts_per_tok if layer < self.num_hidden_layers else self.dspark_num_experts_per_tok

    @property
    def num_layers_with_drafts(self) -> int:
        """Backbone layers plus draft stages."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def decoder_start_layer(self) -> int:
        """First layer of the decoder half (section 5): the last KV source."""
        return self.kv_source_layer_ids[-1]

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """Tensor name prefix of every layer id: `layers.N` for the backbone, `mtp.m` for drafts."""
        drafts = tuple(f"mtp.{m}" for m in range(self.num_nextn_predict_layers))
        return tuple(f"layers.{n}" for n in range(self.num_hidden_layers)) + drafts


class CheckpointConfig(BaseModel):
    """The whole released `config.json`. `vision_config` is kept as it is: images are not served yet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    architectures: tuple[Literal["DeepseekV41ForCausalLM"]]
    model_type: Literal["deepseek_v41"]
    dtype: Literal["bfloat16"]
    transformers_version: str | None = None
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    quantization_config: QuantizationConfig
    text_config: ModelConfig
    vision_config: dict[str, Any] | None = None

    @classmethod
    def load(cls, path: Path) -> CheckpointConfig:
        """Read and check a `config.json`.

        Args:
            path: the file.
        Raises: ConfigError naming the file and every key that does not fit.
        """
        try:
            return cls.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not JSON ({error})") from error
        except ValidationError as error:
            details = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"{path}: {details}") from error
