"""One rank's weights: what the model multiplies with, and how it is cut out of a checkpoint.

GPUs hold dense FP8 weights as the checkpoint does (`spec/model.md` section 2.2) and other matrices in BF16; CPUs hold
every matrix in the accumulation type, which is exact and spares a conversion per product. Matrices that multiply the
same vector are stacked, so that one product does for all. Expert pages are not here: the model reads them through an
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
from kernels.tensors import Fp8Matrix, Matrix, stack
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
    """What a KV source layer does with its compressor's projection (section 4.3); replicated."""

    norm: Tensor
    """`[head_dim]` bf16."""
    wk: Tensor
    """`[index_head_dim, head_dim]`."""
    k_norm: Tensor
    """`[index_head_dim]` bf16."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Attention of one layer (section 4); heads and output groups are cut over ranks, the rest is replicated."""

    low_rank: Matrix
    """`[q_lora_rank + head_dim, hidden]`: wq_a, wkv."""
    q_norm: Tensor
    """`[q_lora_rank]` bf16."""
    kv_norm: Tensor
    """`[head_dim]` bf16."""
    queries: Matrix
    """`[local_heads * head_dim (+ index_n_heads * index_head_dim), q_lora_rank]`: wq_b, and the indexer's, which all
    ranks hold, so that they choose the same entries."""
    sinks: Tensor
    """`[local_heads]` float32."""
    wo_a: tuple[Matrix, ...]
    """Of each local group: `[o_lora_rank, heads_per_group * head_dim]`."""
    wo_b: Matrix
    """`[hidden, local_groups * o_lora_rank]`."""
    side: Tensor | None
    """`[n, hidden]`: what multiplies the input before it is quantised: the compressor's wkv and, at ratio 2, wgate; the
    indexer's weights_proj. Each only where the layer has it."""
    compressor: CompressorWeights | None
    has_indexer: bool


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router (replicated) and this rank's slice of the shared expert (section 6)."""

    gate: Tensor
    """`[num_experts, hidden]`."""
    bias: Tensor
    """`[num_experts]` float32."""
    shared_gate_up: Matrix
    """`[2 * local_inter, hidden]`: w1, w3."""
    shared_down: Matrix
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
    wkv: Matrix
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

    main_proj: Matrix
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

    def fp8(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Matrix:
        codes = self._reader.read(f"{name}.weight", rows, columns)
        scales = self._reader.read(f"{name}.scale", _tiles(rows), _tiles(columns))
        if self._device.type == "cpu":
            return dequantize_fp8_tiles(codes, scales).to(self._matrix_dtype)
        return Fp8Matrix(codes.to(self._device), scales.to(self._device))

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
        has_indexer = layer in config.index_source_layer_ids
        queries = [self.fp8(f"{name}.wq_b", rows=_scaled(heads, config.head_dim))]
        if has_indexer:
            queries.append(self.fp8(f"{name}.indexer.wq_b"))
        return AttentionWeights(
            low_rank=stack((self.fp8(f"{name}.wq_a"), self.fp8(f"{name}.wkv"))),
            q_norm=self.plain(f"{name}.q_norm.weight"),
            kv_norm=self.plain(f"{name}.kv_norm.weight"),
            queries=stack(queries),
            sinks=self.plain(f"{name}.attn_sink", rows=heads),
            wo_a=tuple(
                self.fp8(f"{name}.wo_a", rows=_scaled(slice(group, group + 1), config.o_lora_rank))
                for group in range(groups.start, groups.stop)
            ),
            wo_b=self.fp8(f"{name}.wo_b", columns=_scaled(groups, config.o_lora_rank)),
            side=self._side(name, layer),
            compressor=self._compressor(name) if layer in config.kv_source_layer_ids else None,
            has_indexer=has_indexer,
        )

    def _side(self, name: str, layer: int) -> Tensor | None:
        config = self._config
        names = []
        if layer in config.kv_source_layer_ids:
            names.append("compressor.wkv")
            if config.compress_ratios[layer] == 2:
                names.append("compressor.wgate")
        if layer in config.index_source_layer_ids:
            names.append("indexer.weights_proj")
        return torch.cat([self.matrix(f"{name}.{part}.weight") for part in names]) if names else None

    def _compressor(self, name: str) -> CompressorWeights:
        return CompressorWeights(
            norm=self.plain(f"{name}.compressor.norm.weight"),
            wk=self.matrix(f"{name}.indexer.wk.weight"),
            k_norm=self.plain(f"{name}.indexer.k_norm.weight"),
        )

    def _moe(self, name: str) -> MoeWeights:
        inter = self._layout.shard(self._config.moe_intermediate_size)
        return MoeWeights(
            gate=self.matrix(f"{name}.gate.weight"),
            bias=self.plain(f"{name}.gate.bias"),
            shared_gate_up=stack([self.fp8(f"{name}.shared_experts.{w}", rows=inter) for w in ("w1", "w3")]),
            shared_down=self.fp8(f"{name}.shared_experts.w2", columns=inter),
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
