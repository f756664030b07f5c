"""One rank's weights: what the model multiplies with, and how it is cut out of a checkpoint.

Dense FP8 weights are dequantised when they are read, which is exact (`spec/model.md` section 2.2: the tile scale is
a power of two). Matrices are held in the accumulation type on the CPU, which spares a conversion per product, and in
BF16 on GPUs; either holds every value exactly. Expert pages are not here: the model reads them through an
`ExpertSource`. `bias_vl`, the vision tower and the image delimiters belong to images, which are not served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.formats import FP8_TILE
from kernels.reference.quantize import dequantize_fp8_tiles
from model.config import ModelConfig
from model.engram_map import EngramHash
from model.parallel import ParallelLayout


class TensorReader(Protocol):
    """Reads parts of named tensors: `model.checkpoint.Checkpoint`."""

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """A copy of the given rows and columns of one tensor, on the CPU."""


@dataclass(frozen=True, slots=True)
class HyperConnectionWeights:
    """Mixes of one sub-layer (section 3)."""

    fn: Tensor
    """`[2 * m + m * m, m * hidden]` float32."""
    base: Tensor
    """`[2 * m + m * m]` float32."""
    scale: Tensor
    """`[3]` float32."""


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Compressor and index key of a KV source layer (section 4.3); replicated."""

    wkv: Tensor
    """`[head_dim, hidden]`."""
    wgate: Tensor | None
    """`[head_dim, hidden]`; ratio 2 only."""
    norm: Tensor
    """`[head_dim]` bf16."""
    wk: Tensor
    """`[index_head_dim, head_dim]`."""
    k_norm: Tensor
    """`[index_head_dim]` bf16."""


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Index query of an index source layer (section 4.5); replicated, so that all ranks choose the same entries."""

    wq_b: Tensor
    """`[index_n_heads * index_head_dim, q_lora_rank]`."""
    weights_proj: Tensor
    """`[index_n_heads, hidden]`."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Attention of one layer (section 4); heads and output groups are cut over ranks, the rest is replicated."""

    wq_a: Tensor
    """`[q_lora_rank, hidden]`."""
    q_norm: Tensor
    """`[q_lora_rank]` bf16."""
    wq_b: Tensor
    """`[local_heads * head_dim, q_lora_rank]`."""
    wkv: Tensor
    """`[head_dim, hidden]`."""
    kv_norm: Tensor
    """`[head_dim]` bf16."""
    sinks: Tensor
    """`[local_heads]` float32."""
    wo_a: Tensor
    """`[local_groups, o_lora_rank, heads_per_group * head_dim]`."""
    wo_b: Tensor
    """`[hidden, local_groups * o_lora_rank]`."""
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router (replicated) and this rank's slice of the shared expert (section 6)."""

    gate: Tensor
    """`[num_experts, hidden]`."""
    bias: Tensor
    """`[num_experts]` float32."""
    shared_w1: Tensor
    """`[local_inter, hidden]`."""
    shared_w3: Tensor
    """`[local_inter, hidden]`."""
    shared_w2: Tensor
    """`[hidden, local_inter]`."""


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """Engram of one layer (section 7).

    The look-up columns are cut over ranks: a rank holds their table rows and the matching input columns of the
    projection.
    """

    codes: Tensor
    """`[local_table_rows, engram_head_dim]` float8_e4m3fn, on the CPU."""
    scales: Tensor
    """`[local_table_rows, engram_head_dim // 32]` uint8 (ue8m0), on the CPU."""
    first_row: int
    """Table row that `codes[0]` is."""
    columns: slice
    """This rank's look-up columns among all `(ngram - 1) * heads`."""
    wkv: Tensor
    """`[(m + 1) * hidden, local_columns * engram_head_dim]`."""
    q_weight: Tensor
    """`[m, hidden]` bf16."""
    k_weight: Tensor
    """`[m, hidden]` bf16."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One backbone layer or draft stage."""

    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperConnectionWeights
    hc_ffn: HyperConnectionWeights
    attention: AttentionWeights
    moe: MoeWeights
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """What DSpark has besides its stages (section 8)."""

    main_proj: Tensor
    """`[hidden, num_targets * hidden]`."""
    main_norm: Tensor
    """`[hidden]` bf16."""
    norm: Tensor
    """`[hidden]` bf16."""
    markov_embed: Tensor
    """`[vocab, markov_rank]` bf16; replicated."""
    markov_head: Tensor
    """`[local_vocab, markov_rank]`."""
    confidence: Tensor
    """`[1, hidden + markov_rank]`."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything but expert pages. `layers` counts draft stages after the backbone."""

    embed: Tensor
    """`[local_vocab, hidden]` bf16."""
    head: Tensor
    """`[local_vocab, hidden]`."""
    norm: Tensor
    """`[hidden]` bf16."""
    layers: tuple[LayerWeights, ...]
    draft: DraftWeights


def load_weights(
    reader: TensorReader,
    config: ModelConfig,
    layout: ParallelLayout,
    device: torch.device,
    accumulate: torch.dtype,
    on_layer: Callable[[int], None] | None = None,
) -> ModelWeights:
    """Read one rank's weights; no other rank's rows or columns are touched.

    Args:
        reader: the opened checkpoint.
        config: its text model.
        layout: which rank.
        device: where dense weights go; Engram tables stay on the CPU.
        accumulate: float32 or float64, the type that products accumulate in.
        on_layer: called with each finished layer's id, for progress.
    Raises: ValueError if the model cannot be cut over `layout`; CheckpointError if a tensor is corrupt.
    """
    layout.check(config)
    loader = _RankLoader(reader, config, layout, device, accumulate)
    layers = []
    for layer in range(config.num_layers_with_drafts):
        layers.append(loader.layer(layer))
        if on_layer is not None:
            on_layer(layer)
    vocab = layout.shard(config.vocab_size)
    return ModelWeights(
        embed=loader.plain("embed.weight", rows=vocab),
        head=loader.matrix("head.weight", rows=vocab),
        norm=loader.plain("norm.weight"),
        layers=tuple(layers),
        draft=loader.draft(),
    )


class _RankLoader:
    def __init__(
        self,
        reader: TensorReader,
        config: ModelConfig,
        layout: ParallelLayout,
        device: torch.device,
        accumulate: torch.dtype,
    ) -> None:
        self._reader = reader
        self._config = config
        self._layout = layout
        self._device = device
        self._matrix_dtype = accumulate if device.type == "cpu" else torch.bfloat16
        self._engram = EngramHash.from_config(config)

    def plain(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        return self._reader.read(name, rows, columns).to(self._device)

    def matrix(self, name: str, rows: slice | None = None) -> Tensor:
        return self._reader.read(name, rows).to(self._matrix_dtype).to(self._device)

    def fp8(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        codes = self._reader.read(f"{name}.weight", rows, columns)
        scales = self._reader.read(f"{name}.scale", _tiles(rows), _tiles(columns))
        return dequantize_fp8_tiles(codes, scales).to(self._matrix_dtype).to(self._device)

    def layer(self, layer: int) -> LayerWeights:
        name = self._config.layer_names[layer]
        return LayerWeights(
            attn_norm=self.plain(f"{name}.attn_norm.weight"),
            ffn_norm=self.plain(f"{name}.ffn_norm.weight"),
            hc_attn=self._hyper_connections(f"{name}.hc_attn"),
            hc_ffn=self._hyper_connections(f"{name}.hc_ffn"),
            attention=self._attention(f"{name}.attn", layer),
            moe=self._moe(f"{name}.ffn"),
            engram=self._engram_layer(layer) if layer in self._config.engram_layer_ids else None,
        )

    def _hyper_connections(self, name: str) -> HyperConnectionWeights:
        return HyperConnectionWeights(
            fn=self.plain(f"{name}_fn"), base=self.plain(f"{name}_base"), scale=self.plain(f"{name}_scale")
        )

    def _attention(self, name: str, layer: int) -> AttentionWeights:
        config, layout = self._config, self._layout
        heads = layout.shard(config.num_attention_heads)
        groups = layout.shard(config.o_groups)
        low_rank = _scaled(groups, config.o_lora_rank)
        wo_a = self.fp8(f"{name}.wo_a", rows=low_rank)
        return AttentionWeights(
            wq_a=self.fp8(f"{name}.wq_a"),
            q_norm=self.plain(f"{name}.q_norm.weight"),
            wq_b=self.fp8(f"{name}.wq_b", rows=_scaled(heads, config.head_dim)),
            wkv=self.fp8(f"{name}.wkv"),
            kv_norm=self.plain(f"{name}.kv_norm.weight"),
            sinks=self.plain(f"{name}.attn_sink", rows=heads),
            wo_a=wo_a.unflatten(0, (-1, config.o_lora_rank)),
            wo_b=self.fp8(f"{name}.wo_b", columns=low_rank),
            compressor=self._compressor(name, layer) if layer in config.kv_source_layer_ids else None,
            indexer=self._indexer(name) if layer in config.index_source_layer_ids else None,
        )

    def _compressor(self, name: str, layer: int) -> CompressorWeights:
        has_gate = self._config.compress_ratios[layer] == 2
        return CompressorWeights(
            wkv=self.matrix(f"{name}.compressor.wkv.weight"),
            wgate=self.matrix(f"{name}.compressor.wgate.weight") if has_gate else None,
            norm=self.plain(f"{name}.compressor.norm.weight"),
            wk=self.matrix(f"{name}.indexer.wk.weight"),
            k_norm=self.plain(f"{name}.indexer.k_norm.weight"),
        )

    def _indexer(self, name: str) -> IndexerWeights:
        return IndexerWeights(
            wq_b=self.fp8(f"{name}.indexer.wq_b"),
            weights_proj=self.matrix(f"{name}.indexer.weights_proj.weight"),
        )

    def _moe(self, name: str) -> MoeWeights:
        inter = self._layout.shard(self._config.moe_intermediate_size)
        return MoeWeights(
            gate=self.matrix(f"{name}.gate.weight"),
            bias=self.plain(f"{name}.gate.bias"),
            shared_w1=self.fp8(f"{name}.shared_experts.w1", rows=inter),
            shared_w3=self.fp8(f"{name}.shared_experts.w3", rows=inter),
            shared_w2=self.fp8(f"{name}.shared_experts.w2", columns=inter),
        )

    def _engram_layer(self, layer: int) -> EngramWeights:
        name = f"{self._config.layer_names[layer]}.engram"
        columns = self._layout.shard(self._engram.num_columns)
        rows = self._engram.table_rows(layer, columns)
        return EngramWeights(
            codes=self._reader.read(f"{name}.embed.weight", rows),
            scales=self._reader.read(f"{name}.embed.scale", rows),
            first_row=rows.start,
            columns=columns,
            wkv=self.fp8(f"{name}.wkv", columns=_scaled(columns, self._config.engram_head_dim)),
            q_weight=self.plain(f"{name}.q_weight"),
            k_weight=self.plain(f"{name}.k_weight"),
        )

    def draft(self) -> DraftWeights:
        last = f"mtp.{self._config.num_nextn_predict_layers - 1}"
        return DraftWeights(
            main_proj=self.fp8("mtp.0.main_proj"),
            main_norm=self.plain("mtp.0.main_norm.weight"),
            norm=self.plain(f"{last}.norm.weight"),
            markov_embed=self.plain(f"{last}.markov_head.embed.weight"),
            markov_head=self.matrix(
                f"{last}.markov_head.head.weight", rows=self._layout.shard(self._config.vocab_size)
            ),
            confidence=self.matrix(f"{last}.confidence_head.proj.weight"),
        )


def _scaled(part: slice, unit: int) -> slice:
    return slice(part.start * unit, part.stop * unit)


def _tiles(part: slice | None) -> slice | None:
    return None if part is None else slice(part.start // FP8_TILE, part.stop // FP8_TILE)
