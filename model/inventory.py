"""The checkpoint's inventory: name, dtype and shape of every tensor, derived from the configuration.

The one place that knows tensor names: the loader checks files against it, the tiny writer fills it.
Source: `spec/model.md` section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from pydantic import BaseModel, ConfigDict, Field

from kernels.formats import FP8_TILE, MXFP4_GROUP
from model.config import CheckpointConfig, ModelConfig


class StoredDtype(StrEnum):
    """Element types of the release, spelled as in a safetensors header."""

    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    I8 = "I8"
    """Two e2m1 codes a byte, low nibble first."""
    BF16 = "BF16"
    F32 = "F32"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return _DTYPE_BYTES[self]


_DTYPE_BYTES = {
    StoredDtype.F8_E4M3: 1,
    StoredDtype.F8_E8M0: 1,
    StoredDtype.I8: 1,
    StoredDtype.BF16: 2,
    StoredDtype.F32: 4,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor of the checkpoint must look like."""

    dtype: StoredDtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Stored size."""
        return prod(self.shape) * self.dtype.num_bytes


class VisionConfig(BaseModel):
    """The image tower's dimensions: `vision_config` of the released `config.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: str
    num_hidden_layers: int = Field(ge=0)
    hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    patch_size: int = Field(ge=1)
    rope_theta: float
    downsample_ratio: int = Field(ge=1)
    max_image_tokens: int = Field(ge=1)
    min_pixels: int = Field(ge=1)
    max_wh_ratio: float | None


Entries = Iterator[tuple[str, TensorSpec]]
"""Names below some prefix with what belongs there."""


def expected_tensors(config: CheckpointConfig) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint, in the order of computation.

    Args:
        config: the whole `config.json`; the vision tensors are expected if it has a `vision_config`.
    Returns: canonical name to spec.
    Raises: pydantic.ValidationError if `vision_config` has other keys than the release.
    """
    tensors = dict(_text_model(config.text_config))
    if config.vision_config is not None:
        vision = VisionConfig.model_validate(config.vision_config)
        tensors.update(_vision_model(vision, config.text_config.hidden_size))
    return tensors


def _text_model(config: ModelConfig) -> Entries:
    hidden = config.hidden_size
    yield "embed.weight", _bf16(config.vocab_size, hidden)
    for layer, prefix in enumerate(config.layer_names):
        for name, spec in _layer(config, layer):
            yield f"{prefix}.{name}", spec
    yield "norm.weight", _bf16(hidden)
    yield "head.weight", _bf16(config.vocab_size, hidden)


def _layer(config: ModelConfig, layer: int) -> Entries:
    yield from _attention(config)
    if layer in config.index_source_layer_ids:
        yield from _indexer_queries(config)
    if layer in config.kv_source_layer_ids:
        yield from _compressor(config, config.compress_ratios[layer])
    yield from _norms_and_hyper_connections(config)
    yield from _moe(config, config.num_experts_of(layer))
    if layer in config.engram_layer_ids:
        yield from _engram(config, config.engram_num_embeddings[config.engram_layer_ids.index(layer)])
    if layer == config.num_hidden_layers:
        yield from _first_draft_stage(config)
    if layer >= config.num_hidden_layers and layer == config.num_layers_with_drafts - 1:
        yield from _last_draft_stage(config)


def _attention(config: ModelConfig) -> Entries:
    hidden, q_lora = config.hidden_size, config.q_lora_rank
    heads_width = config.num_attention_heads * config.head_dim
    groups_width = config.o_groups * config.o_lora_rank
    yield from _fp8("attn.wq_a", q_lora, hidden)
    yield from _fp8("attn.wq_b", heads_width, q_lora)
    yield from _fp8("attn.wkv", config.head_dim, hidden)
    yield from _fp8("attn.wo_a", groups_width, heads_width // config.o_groups)
    yield from _fp8("attn.wo_b", hidden, groups_width)
    yield "attn.q_norm.weight", _bf16(q_lora)
    yield "attn.kv_norm.weight", _bf16(config.head_dim)
    yield "attn.attn_sink", _f32(config.num_attention_heads)


def _indexer_queries(config: ModelConfig) -> Entries:
    yield from _fp8("attn.indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
    yield "attn.indexer.weights_proj.weight", _bf16(config.index_n_heads, config.hidden_size)


def _compressor(config: ModelConfig, ratio: int) -> Entries:
    head_dim, hidden = config.head_dim, config.hidden_size
    yield "attn.indexer.wk.weight", _bf16(config.index_head_dim, head_dim)
    yield "attn.indexer.k_norm.weight", _bf16(config.index_head_dim)
    yield "attn.compressor.wkv.weight", _bf16(head_dim, hidden)
    yield "attn.compressor.norm.weight", _bf16(head_dim)
    if ratio == 2:
        yield "attn.compressor.wgate.weight", _bf16(head_dim, hidden)


def _norms_and_hyper_connections(config: ModelConfig) -> Entries:
    copies = config.hc_mult
    num_mixes = copies * (copies + 2)  # pre and post weights of every copy, and a mixing matrix
    yield "attn_norm.weight", _bf16(config.hidden_size)
    yield "ffn_norm.weight", _bf16(config.hidden_size)
    for block in ("attn", "ffn"):
        yield f"hc_{block}_fn", _f32(num_mixes, copies * config.hidden_size)
        yield f"hc_{block}_base", _f32(num_mixes)
        yield f"hc_{block}_scale", _f32(3)


def _moe(config: ModelConfig, num_experts: int) -> Entries:
    hidden, inter = config.hidden_size, config.moe_intermediate_size
    yield "ffn.gate.weight", _bf16(num_experts, hidden)
    yield "ffn.gate.bias", _f32(num_experts)
    yield "ffn.gate.bias_vl", _f32(num_experts)
    for expert in range(num_experts):
        yield from _mxfp4(f"ffn.experts.{expert}.w1", inter, hidden)
        yield from _mxfp4(f"ffn.experts.{expert}.w3", inter, hidden)
        yield from _mxfp4(f"ffn.experts.{expert}.w2", hidden, inter)
    yield from _fp8("ffn.shared_experts.w1", inter, hidden)
    yield from _fp8("ffn.shared_experts.w3", inter, hidden)
    yield from _fp8("ffn.shared_experts.w2", hidden, inter)


def _engram(config: ModelConfig, num_rows: int) -> Entries:
    hidden, copies, head_dim = config.hidden_size, config.hc_mult, config.engram_head_dim
    num_columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads * head_dim
    yield "engram.embed.weight", TensorSpec(StoredDtype.F8_E4M3, (num_rows, head_dim))
    yield "engram.embed.scale", TensorSpec(StoredDtype.F8_E8M0, (num_rows, head_dim // MXFP4_GROUP))
    yield "engram.q_weight", _bf16(copies, hidden)
    yield "engram.k_weight", _bf16(copies, hidden)
    yield from _fp8("engram.wkv", (copies + 1) * hidden, num_columns)


def _first_draft_stage(config: ModelConfig) -> Entries:
    hidden = config.hidden_size
    yield "main_norm.weight", _bf16(hidden)
    yield from _fp8("main_proj", hidden, len(config.dspark_target_layer_ids) * hidden)


def _last_draft_stage(config: ModelConfig) -> Entries:
    hidden, rank = config.hidden_size, config.dspark_markov_rank
    yield "norm.weight", _bf16(hidden)
    yield "markov_head.embed.weight", _bf16(config.vocab_size, rank)
    yield "markov_head.head.weight", _bf16(config.vocab_size, rank)
    yield "confidence_head.proj.weight", _bf16(1, hidden + rank)


def _vision_model(config: VisionConfig, text_hidden: int) -> Entries:
    width = config.hidden_size
    for delimiter in ("image_start", "image_end", "image_newline"):
        yield delimiter, _bf16(text_hidden)
    yield from _linear_with_bias("vision.patch_embed.proj", width, 3 * config.patch_size**2)
    for layer in range(config.num_hidden_layers):
        prefix = f"vision.blocks.{layer}"
        yield from _linear_with_bias(f"{prefix}.attn.wqkv", 3 * width, width)
        yield from _linear_with_bias(f"{prefix}.attn.wo", width, width)
        yield f"{prefix}.mlp.w1.weight", _bf16(2 * config.intermediate_size, width)
        yield f"{prefix}.mlp.w2.weight", _bf16(width, config.intermediate_size)
        yield f"{prefix}.norm1.weight", _bf16(width)
        yield f"{prefix}.norm2.weight", _bf16(width)
    yield "vision.norm.weight", _bf16(width)
    yield from _linear_with_bias("aligner.w1", text_hidden, config.downsample_ratio**2 * width)
    yield from _linear_with_bias("aligner.w2", text_hidden, text_hidden)


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec(StoredDtype.BF16, shape)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec(StoredDtype.F32, shape)


def _linear_with_bias(name: str, rows: int, columns: int) -> Entries:
    yield f"{name}.weight", _bf16(rows, columns)
    yield f"{name}.bias", _bf16(rows)


def _fp8(name: str, rows: int, columns: int) -> Entries:
    yield f"{name}.weight", TensorSpec(StoredDtype.F8_E4M3, (rows, columns))
    yield f"{name}.scale", TensorSpec(StoredDtype.F8_E8M0, (rows // FP8_TILE, columns // FP8_TILE))


def _mxfp4(name: str, rows: int, columns: int) -> Entries:
    yield f"{name}.weight", TensorSpec(StoredDtype.I8, (rows, columns // 2))
    yield f"{name}.scale", TensorSpec(StoredDtype.F8_E8M0, (rows, columns // MXFP4_GROUP))
