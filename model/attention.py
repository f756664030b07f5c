"""CSA2 attention: window keys, compressed entries chosen by the indexer, grouped output projection.

Source: `spec/model.md` section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.reference.attention import sparse_attention
from kernels.reference.compressor import pool_pairs
from kernels.reference.indexer import candidate_pool, index_scores, select_entries
from kernels.reference.linear import linear, linear_bf16
from kernels.reference.norm import rms_norm
from kernels.reference.quantize import quantize_q4n, quantize_q4u, quantize_q8
from kernels.reference.rope import Yarn, apply_rope, rope_frequencies
from model.batch import ForwardBatch, Rows
from model.config import ModelConfig
from model.kv_cache import KvCaches
from model.numerics import Numerics
from model.parallel import Collectives
from model.probe import Probe
from model.weights import AttentionWeights, CompressorWeights, IndexerWeights


@dataclass(slots=True)
class Selection:
    """Choices that later layers of the same forward reuse."""

    entries: Tensor | None = None
    """`[num_rows, index_topk]` int64: the last index source's picks, ascending, -1 as filler."""
    pools: list[Tensor] = field(default_factory=list)
    """Per sequence, `[its rows, its entries]` bool: the candidate pool; empty before its source layer."""

    def keep_decoder_rows(self, batch: ForwardBatch) -> None:
        """Forget the rows that end before the decoder half."""
        if self.entries is not None:
            self.entries = self.entries[batch.decoder_rows]
        spans = batch.decoder.spans
        self.pools = [
            pool[len(pool) - (end - begin) :] for pool, (begin, end) in zip(self.pools, spans, strict=False)
        ]


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
        keys, is_valid = self._window_keys(layer, kv, rows)
        if config.compress_ratios[layer]:
            assert selection.entries is not None, f"layer {layer} has no index source before it"
            entries, is_entry = self._entry_keys(layer, rows, batch, selection.entries)
            keys, is_valid = torch.cat((keys, entries), dim=1), torch.cat((is_valid, is_entry), dim=1)
        self._caches.windows[layer][rows.kept_ring] = kv[rows.kept]
        core = self.attention_core(weights, q, keys, is_valid)
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

    def _window_keys(self, layer: int, kv: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys of each row's window: `[num_rows, window, head_dim]` bf16 and which of them exist."""
        new = kv[rows.window_new.clamp_min(0)]
        cached = self._caches.windows[layer][rows.window_ring.clamp_min(0)]
        is_new = rows.window_new >= 0
        return torch.where(is_new.unsqueeze(-1), new, cached), is_new | (rows.window_ring >= 0)

    def _entry_keys(
        self, layer: int, rows: Rows, batch: ForwardBatch, selected: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Selected compressed entries: `[num_rows, index_topk, head_dim]` bf16 and which picks are real."""
        source = self._config.kv_source_of(layer)
        cache_idx = self._caches.geometry.entry_idx(
            batch.block_table,
            rows.sequence.unsqueeze(1),
            selected.clamp_min(0),
            self._config.compress_ratios[layer],
        )
        return self._caches.entries[source][cache_idx], selected >= 0

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
        q = linear_bf16(quantize_q8(low_rank), weights.wq_b, self._accumulate)
        q = q.unflatten(-1, (-1, config.index_head_dim))
        q = quantize_q4u(apply_rope(q, rows.positions, self.frequencies(layer)))
        head_weights = linear_bf16(x, weights.weights_proj, self._accumulate)
        head_weights = head_weights * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)

        ratio = config.compress_ratios[layer]
        source = config.kv_source_of(layer)
        num_visible = (rows.positions + 1) // ratio
        is_pool_source = layer == config.candidate_source_layer_id
        picks, pools = [], []
        for index, (begin, end) in enumerate(rows.spans):
            visible = num_visible[begin:end]
            scores = index_scores(
                q[begin:end],
                self._caches.read_index_keys(
                    source, ratio, batch.block_table[index], batch.num_entries[ratio][index]
                ),
                head_weights[begin:end],
                visible,
                round_bf16=self._numerics.round_index_scores,
                accumulate=self._accumulate,
            )
            if is_pool_source:
                pools.append(
                    candidate_pool(scores, visible, config.candidate_block_size, config.candidate_topk_blocks)
                )
            elif layer > config.candidate_source_layer_id:
                scores = scores.masked_fill(~selection.pools[index], -torch.inf)
            picks.append(select_entries(scores, config.index_topk))
        if is_pool_source:
            selection.pools = pools
            self._probe(layer, "pool", pools[-1])
        selection.entries = torch.cat(picks)
        self._probe(layer, "selected", selection.entries)
