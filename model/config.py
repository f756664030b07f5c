"""ModelConfig: the checkpoint's `config.json`, typed, and the layer roles derived from it.

Source: `spec/model.md` section 1.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from kernels.formats import FP8_TILE


class ConfigError(ValueError):
    """A `config.json` that is missing, malformed or not of this model."""


class RopeScaling(BaseModel):
    """YaRN settings of the layers with a compression ratio (section 4.1)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rope_type: Literal["yarn"]
    factor: PositiveFloat
    beta_fast: PositiveFloat
    beta_slow: PositiveFloat
    original_max_position_embeddings: PositiveInt


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
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    moe_intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: Literal[1] = 1
    head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    q_lora_rank: PositiveInt
    o_lora_rank: PositiveInt
    o_groups: PositiveInt
    hidden_act: Literal["silu"] = "silu"
    swiglu_limit: PositiveFloat
    rms_norm_eps: PositiveFloat
    attention_bias: Literal[False] = False
    tie_word_embeddings: Literal[False] = False
    max_position_embeddings: PositiveInt
    rope_theta: float = Field(gt=1)
    compress_rope_theta: float = Field(gt=1)
    rope_scaling: RopeScaling
    n_routed_experts: PositiveInt
    n_shared_experts: Literal[1] = 1
    num_experts_per_tok: PositiveInt
    scoring_func: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: Literal[True] = True
    routed_scaling_factor: PositiveFloat
    sliding_window: PositiveInt
    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    index_topk: PositiveInt
    index_source_layer_ids: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int
    candidate_topk_blocks: PositiveInt
    candidate_block_size: PositiveInt
    hc_mult: PositiveInt
    hc_sinkhorn_iters: PositiveInt
    hc_eps: PositiveFloat
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int = Field(ge=2)
    engram_vocab_size: PositiveInt
    engram_n_heads: PositiveInt
    engram_head_dim: PositiveInt
    engram_pad_token_id: int
    engram_compressed_vocab_size: PositiveInt
    num_nextn_predict_layers: PositiveInt
    dspark_block_size: PositiveInt
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: PositiveInt
    dspark_n_routed_experts: PositiveInt
    dspark_num_experts_per_tok: PositiveInt
    initializer_range: float = 0.02
    use_cache: bool = True
    compress_ratios: tuple[Literal[0, 1, 2], ...]

    @model_validator(mode="after")
    def _check_relations(self) -> ModelConfig:
        for check in (
            self._check_layer_lists,
            self._check_sources,
            self._check_candidate_pool,
            self._check_engram,
            self._check_drafts,
            self._check_choices,
            self._check_widths,
        ):
            check()
        return self

    def _check_layer_lists(self) -> None:
        if len(self.compress_ratios) != self.num_layers_with_drafts:
            raise ValueError(
                f"compress_ratios has {len(self.compress_ratios)} entries, but num_hidden_layers = "
                f"{self.num_hidden_layers} and num_nextn_predict_layers = {self.num_nextn_predict_layers}"
            )
        for name in (
            "kv_source_layer_ids",
            "index_source_layer_ids",
            "engram_layer_ids",
            "dspark_target_layer_ids",
        ):
            ids = getattr(self, name)
            if list(ids) != sorted(set(ids)):
                raise ValueError(f"{name} must ascend without repeats, got {ids}")
            if ids and not 0 <= ids[0] <= ids[-1] < self.num_hidden_layers:
                raise ValueError(f"{name} = {ids} must lie in num_hidden_layers = {self.num_hidden_layers}")

    def _check_sources(self) -> None:
        """Compressed KV and indices exist wherever they are read, and belong together."""
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            for layer in getattr(self, name):
                if not self.compress_ratios[layer]:
                    raise ValueError(f"{name} has layer {layer}, whose entry in compress_ratios is 0")
        for layer, ratio in enumerate(self.compress_ratios[: self.num_hidden_layers]):
            if not ratio:
                continue
            for name in ("kv_source_layer_ids", "index_source_layer_ids"):
                if not any(source <= layer for source in getattr(self, name)):
                    raise ValueError(
                        f"compress_ratios[{layer}] is {ratio}, but {name} = {getattr(self, name)} has no "
                        f"layer up to {layer}"
                    )
            source = self.kv_source_of(layer)
            if self.compress_ratios[source] != ratio:
                raise ValueError(
                    f"compress_ratios[{layer}] is {ratio}, but that layer reads compressed KV of layer {source} "
                    f"(kv_source_layer_ids), where it is {self.compress_ratios[source]}"
                )
            if self.index_source_of(layer) < source:
                raise ValueError(
                    f"layer {layer} reads compressed KV of layer {source} (kv_source_layer_ids), but indices of "
                    f"layer {self.index_source_of(layer)} (index_source_layer_ids), made for another source"
                )
        if not self.kv_source_layer_ids:
            raise ValueError("kv_source_layer_ids is empty, so no layer starts the decoder half")

    def _check_candidate_pool(self) -> None:
        source = self.candidate_source_layer_id
        if source not in self.index_source_layer_ids:
            raise ValueError(
                f"candidate_source_layer_id = {source} is not in index_source_layer_ids = "
                f"{self.index_source_layer_ids}"
            )
        # At ratio 1 every row sees an entry, which the pool needs, and row and entry count are later layers' too.
        for layer in self.index_source_layer_ids:
            if layer >= source and self.compress_ratios[layer] != 1:
                raise ValueError(
                    f"compress_ratios[{layer}] is {self.compress_ratios[layer]}, but an index source from "
                    f"candidate_source_layer_id = {source} on must have 1"
                )

    def _check_engram(self) -> None:
        if len(self.engram_layer_ids) != len(self.engram_num_embeddings):
            raise ValueError(
                f"engram_layer_ids = {self.engram_layer_ids} and engram_num_embeddings = "
                f"{self.engram_num_embeddings} must have the same length"
            )
        # Later layers do not see every row (section 5).
        if any(layer >= self.decoder_start_layer for layer in self.engram_layer_ids):
            raise ValueError(
                f"engram_layer_ids = {self.engram_layer_ids} must lie before layer {self.decoder_start_layer}, "
                f"the last of kv_source_layer_ids"
            )

    def _check_drafts(self) -> None:
        targets = self.dspark_target_layer_ids
        if not targets:
            raise ValueError("dspark_target_layer_ids is empty, so the draft stages have no input")
        # Earlier layers see rows that these do not (section 5), and the taps of a row are read together.
        if targets[0] < self.decoder_start_layer:
            raise ValueError(
                f"dspark_target_layer_ids = {targets} must not lie before layer {self.decoder_start_layer}, the "
                f"last of kv_source_layer_ids"
            )
        drafts = self.compress_ratios[self.num_hidden_layers :]
        if any(drafts):
            raise ValueError(
                f"compress_ratios ends with {drafts} for num_nextn_predict_layers = "
                f"{self.num_nextn_predict_layers} draft stages, which have no compressed KV: all must be 0"
            )

    def _check_choices(self) -> None:
        """What is chosen is there to choose."""
        for chosen, available in (
            ("num_experts_per_tok", "n_routed_experts"),
            ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
            ("qk_rope_head_dim", "head_dim"),
            ("qk_rope_head_dim", "index_head_dim"),
            ("engram_compressed_vocab_size", "vocab_size"),
        ):
            if getattr(self, chosen) > getattr(self, available):
                raise ValueError(
                    f"{chosen} = {getattr(self, chosen)} is more than {available} = {getattr(self, available)}"
                )
        for name in ("dspark_noise_token_id", "engram_pad_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(
                    f"{name} = {getattr(self, name)} is no token of vocab_size = {self.vocab_size}"
                )

    def _check_widths(self) -> None:
        """Every stored or quantised width is whole groups, every head is in one output group."""
        for name in (
            "hidden_size",
            "moe_intermediate_size",
            "head_dim",
            "index_head_dim",
            "q_lora_rank",
            "o_lora_rank",
            "engram_head_dim",
        ):
            if getattr(self, name) % FP8_TILE:
                raise ValueError(f"{name} = {getattr(self, name)} is not a multiple of {FP8_TILE}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim = {self.qk_rope_head_dim} is odd, but pairs are rotated")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of o_groups = "
                f"{self.o_groups}"
            )

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

    @model_validator(mode="after")
    def _check_token_ids(self) -> CheckpointConfig:
        vocab_size = self.text_config.vocab_size
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            if not 0 <= getattr(self, name) < vocab_size:
                raise ValueError(f"{name} = {getattr(self, name)} is no token of vocab_size = {vocab_size}")
        return self

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
