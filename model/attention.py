"""CSA2 attention: window keys, compressed entries chosen by the indexer, grouped output projection.

Source: `spec/model.md` section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.attention import attention_row_bytes, sparse_attention
from kernels.reference.compressor import pool_pairs
from kernels.reference.indexer import (
    candidate_pool,
    index_row_bytes,
    index_scores,
    mask_outside_pool,
    select_entries,
)
from kernels.reference.linear import linear, linear_bf16
from kernels.reference.norm import rms_norm
from kernels.reference.quantize import quantize_q4n, quantize_q4u, quantize_q8
from kernels.reference.rope import Yarn, apply_rope, rope_frequencies
from model.batch import ForwardBatch, Rows
from model.collectives import Collectives
from model.config import ModelConfig
from model.kv_cache import KvCaches
from model.numerics import Numerics
from model.probe import Probe
from model.row_tiles import split_rows
from model.weights import AttentionWeights, CompressorWeights, IndexerWeights


@dataclass(slots=True)
class Selection:
    """Choices that later layers of the same forward reuse."""

    entry_idx: Tensor | None = None
    """`[num_rows, index_topk]` int64: cache rows of the last index source's picks, oldest first, -1 as filler."""
    pool: Tensor | None = None
    """`[num_rows, max_blocks]` bool: candidate blocks of each row's sequence; None before their source layer."""

    def keep_decoder_rows(self, batch: ForwardBatch) -> None:
        """Forget the rows that end before the decoder half."""
        if self.entry_idx is not None:
            self.entry_idx = self.entry_idx[batch.decoder_rows]
        if self.pool is not None:
            self.pool = self.pool[batch.decoder_rows]


class Attention:
    """Attention of all layers of one rank. Stateless but for the caches.

    Per layer and step: `write_global` (KV source layers only, over all rows of the step), then `attend`.
    """

    def __init__(
        self,
        config: ModelConfig,
        caches: KvCaches,
        collectives: Collectives,
        numerics: Numerics,
        device: torch.device,
        probe: Probe,
    ) -> None:
        self._config = config
        self._caches = caches
        self._collectives = collectives
        self._numerics = numerics
        self._accumulate = numerics.accumulate
        self._probe = probe
        scaling = config.rope_scaling
        yarn = Yarn(
            scaling.factor, scaling.beta_fast, scaling.beta_slow, scaling.original_max_position_embeddings
        )
        rope_dim = config.qk_rope_head_dim
        self._plain_rope = rope_frequencies(rope_dim, config.rope_theta, None, self._accumulate).to(device)
        self._compressed_rope = rope_frequencies(
            rope_dim, config.compress_rope_theta, yarn, self._accumulate
        ).to(device)

    def frequencies(self, layer: int) -> Tensor:
        """RoPE frequencies of everything in a layer: `[qk_rope_head_dim // 2]`."""
        return self._compressed_rope if self._config.compress_ratios[layer] else self._plain_rope

    def write_global(self, layer: int, weights: CompressorWeights, x: Tensor, batch: ForwardBatch) -> None:
        """Compress a KV source layer's input into the entries and index keys that this step completes.

        Args:
            layer: the source.
            weights: its compressor.
            x: `[num_tokens, hidden]` bf16, normalised input of all rows.
            batch: the step.
        """
        config = self._config
        writes = batch.writes[config.compress_ratios[layer]]
        pooled = self._pool(layer, weights, x, batch)
        latent = rms_norm(pooled, weights.norm, config.rms_norm_eps, self._accumulate)
        frequencies = self.frequencies(layer)

        key = linear_bf16(latent, weights.wk, self._accumulate)
        key = rms_norm(key, weights.k_norm, config.rms_norm_eps, self._accumulate)
        key = quantize_q4u(apply_rope(key, writes.positions, frequencies))
        self._caches.index_keys[layer][writes.cache_idx] = key

        entry = quantize_q4n(apply_rope(latent, writes.positions, frequencies))
        self._caches.entries[layer][writes.cache_idx] = entry

    def _pool(self, layer: int, weights: CompressorWeights, x: Tensor, batch: ForwardBatch) -> Tensor:
        """One latent per completed entry, before its norm: `[num_entries, head_dim]` bf16."""
        if weights.wgate is None:
            return linear_bf16(x, weights.wkv, self._accumulate)
        halves = self._caches.halves[layer]
        writes = batch.writes[2]
        new = torch.stack(
            (linear(x, weights.wkv, self._accumulate), linear(x, weights.wgate, self._accumulate)), dim=1
        )  # [num_tokens, 2 (value, gate), head_dim]
        is_new = (writes.previous_rows >= 0).view(-1, 1, 1)
        first = torch.where(is_new, new[writes.previous_rows.clamp_min(0)], halves[writes.previous_halves])
        pair = torch.stack((first, new[writes.rows]), dim=1)  # [num_entries, 2 (token), 2, head_dim]
        halves[batch.half_idx] = new[batch.half_rows]
        return pool_pairs(pair[:, :, 0], pair[:, :, 1])

    def attend(
        self,
        layer: int,
        weights: AttentionWeights,
        x: Tensor,
        kv: Tensor,
        rows: Rows,
        batch: ForwardBatch,
        selection: Selection,
    ) -> Tensor:
        """Attention of one backbone layer.

        Args:
            layer: its id.
            weights: its weights on this rank.
            x: `[num_rows, hidden]` bf16, normalised input.
            kv: `[num_kv_rows, head_dim]` bf16: window keys of this step, which `rows` indexes.
            rows: the rows that are evaluated.
            batch: the step they belong to.
            selection: picks so far; replaced at index source layers.
        Returns: `[num_rows, hidden]` bf16, complete on every rank.
        """
        config = self._config
        low_rank, q = self.queries(layer, weights, x, rows.positions)
        if weights.indexer is not None:
            self._select(layer, weights.indexer, x, low_rank, rows, batch, selection)
        core = torch.empty_like(q)
        num_keys = config.sliding_window + (config.index_topk if config.compress_ratios[layer] else 0)
        for tile in split_rows(0, len(q), attention_row_bytes(*q.shape[1:], num_keys, self._accumulate)):
            keys, is_valid = self._keys(layer, kv, rows, tile, selection)
            core[tile] = self.attention_core(weights, q[tile], keys, is_valid)
        self._caches.windows[layer][rows.kept_ring] = kv[rows.kept]
        self._probe(layer, "attn_core", core)
        return self.output(layer, weights, core, rows.positions)

    def queries(
        self, layer: int, weights: AttentionWeights, x: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries of new rows (section 4.2).

        Returns: the low-rank query `[num_rows, q_lora_rank]` and the rotated queries
            `[num_rows, local_heads, head_dim]`, both bf16.
        """
        config, accumulate = self._config, self._accumulate
        low_rank = linear_bf16(quantize_q8(x), weights.wq_a, accumulate)
        low_rank = rms_norm(low_rank, weights.q_norm, config.rms_norm_eps, accumulate)
        q = linear_bf16(quantize_q8(low_rank), weights.wq_b, accumulate).unflatten(-1, (-1, config.head_dim))
        q = apply_rope(q, positions, self.frequencies(layer))
        self._probe(layer, "qr", low_rank)
        self._probe(layer, "q", q)
        return low_rank, q

    def window_kv(self, layer: int, weights: AttentionWeights, x: Tensor, positions: Tensor) -> Tensor:
        """Window key of each row: `[num_rows, hidden]` bf16 to `[num_rows, head_dim]` bf16, rotated and quantised."""
        kv = linear_bf16(quantize_q8(x), weights.wkv, self._accumulate)
        kv = rms_norm(kv, weights.kv_norm, self._config.rms_norm_eps, self._accumulate)
        kv = quantize_q8(apply_rope(kv, positions, self.frequencies(layer)))
        self._probe(layer, "window_kv", kv)
        return kv

    def attention_core(self, weights: AttentionWeights, q: Tensor, keys: Tensor, is_valid: Tensor) -> Tensor:
        """Attention over gathered keys, see `sparse_attention`."""
        scale = self._config.head_dim**-0.5
        return sparse_attention(q, keys, is_valid, weights.sinks, scale, self._accumulate)

    def output(self, layer: int, weights: AttentionWeights, core: Tensor, positions: Tensor) -> Tensor:
        """Inverse rotation, grouped low-rank projection and the sum over ranks.

        Args:
            layer: its id.
            weights: its weights on this rank.
            core: `[num_rows, local_heads, head_dim]` bf16.
            positions: `[num_rows]` int64.
        Returns: `[num_rows, hidden]` bf16.
        """
        unrotated = apply_rope(core, positions, self.frequencies(layer), inverse=True)
        num_groups = weights.wo_a.shape[0]
        grouped = unrotated.flatten(1).unflatten(1, (num_groups, -1))
        z = torch.cat(
            [linear_bf16(grouped[:, g], weights.wo_a[g], self._accumulate) for g in range(num_groups)], dim=1
        )
        partial = linear(quantize_q8(z), weights.wo_b, self._accumulate)
        return self._collectives.all_reduce(partial).to(torch.bfloat16)

    def _keys(
        self, layer: int, kv: Tensor, rows: Rows, tile: slice, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """Keys of a tile of rows, window before entries: `[tile_rows, num_keys, head_dim]` bf16 and which exist."""
        keys, is_valid = self._window_keys(layer, kv, rows.window_new[tile], rows.window_ring[tile])
        if self._config.compress_ratios[layer] == 0:
            return keys, is_valid
        assert selection.entry_idx is not None, f"layer {layer} has no index source before it"
        entry_idx = selection.entry_idx[tile]
        entries = self._caches.entries[self._config.kv_source_of(layer)][entry_idx.clamp_min(0)]
        return torch.cat((keys, entries), dim=1), torch.cat((is_valid, entry_idx >= 0), dim=1)

    def _window_keys(
        self, layer: int, kv: Tensor, window_new: Tensor, window_ring: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Window keys of a tile of rows: `[tile_rows, window, head_dim]` bf16 and which of them exist."""
        new = kv[window_new.clamp_min(0)]
        cached = self._caches.windows[layer][window_ring.clamp_min(0)]
        is_new = window_new >= 0
        return torch.where(is_new.unsqueeze(-1), new, cached), is_new | (window_ring >= 0)

    def _select(
        self,
        layer: int,
        weights: IndexerWeights,
        x: Tensor,
        low_rank: Tensor,
        rows: Rows,
        batch: ForwardBatch,
        selection: Selection,
    ) -> None:
        """Score the visible entries and replace the picks of `selection` (section 4.5)."""
        config = self._config
        ratio = config.compress_ratios[layer]
        q, head_weights = self._index_queries(layer, weights, x, low_rank, rows.positions)
        num_visible = (rows.positions + 1) // ratio
        picks = torch.empty(len(q), config.index_topk, dtype=torch.int64, device=q.device)
        if layer == config.candidate_source_layer_id:
            num_blocks = -(-max(batch.num_entries[ratio]) // config.candidate_block_size)
            selection.pool = torch.zeros(len(q), num_blocks, dtype=torch.bool, device=q.device)
        for index, (begin, end) in enumerate(rows.spans):
            num_entries = batch.num_entries[ratio][index]
            keys = self._caches.read_index_keys(
                config.kv_source_of(layer), ratio, batch.block_table[index], num_entries
            )
            row_bytes = index_row_bytes(config.index_n_heads, num_entries, self._accumulate)
            for tile in split_rows(begin, end, row_bytes):
                scores = index_scores(
                    q[tile],
                    keys,
                    head_weights[tile],
                    num_visible[tile],
                    round_bf16=self._numerics.round_index_scores,
                    accumulate=self._accumulate,
                )
                picks[tile] = self._choose_entries(layer, scores, num_visible[tile], selection.pool, tile)
        entry_idx = self._caches.geometry.entry_idx(
            batch.block_table, rows.sequence.unsqueeze(1), picks.clamp_min(0), ratio
        )
        selection.entry_idx = torch.where(picks >= 0, entry_idx, -1)
        if layer == config.candidate_source_layer_id:
            self._probe(layer, "pool", selection.pool)
        self._probe(layer, "selected", picks)

    def _index_queries(
        self, layer: int, weights: IndexerWeights, x: Tensor, low_rank: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Index queries `[num_rows, index_n_heads, index_head_dim]` and the heads' weights, both bf16."""
        config = self._config
        q = linear_bf16(quantize_q8(low_rank), weights.wq_b, self._accumulate)
        q = q.unflatten(-1, (-1, config.index_head_dim))
        q = quantize_q4u(apply_rope(q, positions, self.frequencies(layer)))
        head_weights = linear_bf16(x, weights.weights_proj, self._accumulate)
        return q, head_weights * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)

    def _choose_entries(
        self, layer: int, scores: Tensor, num_visible: Tensor, pool: Tensor | None, tile: slice
    ) -> Tensor:
        """Best entries of a tile of rows; the pool's source layer fills the pool, layers after it stay inside."""
        block_size = self._config.candidate_block_size
        if pool is not None:
            pool = pool[tile, : -(-scores.shape[1] // block_size)]
            if layer == self._config.candidate_source_layer_id:
                pool[:] = candidate_pool(scores, num_visible, block_size, self._config.candidate_topk_blocks)
            else:
                scores = mask_outside_pool(scores, pool, block_size)
        return select_entries(scores, self._config.index_topk)
