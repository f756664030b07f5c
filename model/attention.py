"""CSA2 attention: window keys, compressed entries chosen by the indexer, grouped output projection.

Source: `spec/model.md` section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.reference.rope import Yarn, rope_frequencies
from kernels.tensors import QuantizedRows
from model.batch import ForwardBatch, Rows
from model.collectives import Collectives
from model.config import ModelConfig
from model.kv_cache import KvCaches
from model.kv_layout import half_ring_size, window_ring_size
from model.operators import Operators
from model.probe import Probe
from model.weights import AttentionWeights, CompressorWeights


@dataclass(slots=True)
class Selection:
    """Choices that later layers of the same forward reuse."""

    entry_rows: Tensor | None = None
    """`[num_rows, index_topk]` int32: cache rows of the last index source's picks, oldest first, -1 as filler."""
    pool: Tensor | None = None
    """`[num_rows, candidate_topk_blocks]` int32: candidate blocks of each row's sequence, ascending, -1 as filler; None
    before their source layer."""

    def keep_decoder_rows(self, batch: ForwardBatch) -> None:
        """Forget the rows that end before the decoder half."""
        if self.entry_rows is not None:
            self.entry_rows = self.entry_rows[batch.decoder_rows]
        if self.pool is not None:
            self.pool = self.pool[batch.decoder_rows]


@dataclass(frozen=True, slots=True)
class Projections:
    """What a layer's attention computes from its input, before it looks at any key."""

    low_rank: Tensor
    """`[num_rows, q_lora_rank]` bf16, Q8."""
    side: Tensor | None
    """`[num_rows, n]`, accumulation type: product with `AttentionWeights.side`."""
    keys: QuantizedRows
    """`[num_new_keys, head_dim]` Q8: window keys."""

    def keep_decoder_rows(self, batch: ForwardBatch) -> Projections:
        """Without the rows that end before the decoder half; their keys stay."""
        side = None if self.side is None else self.side[batch.decoder_rows]
        return replace(self, low_rank=self.low_rank[batch.decoder_rows], side=side)


class Attention:
    """Attention of all layers of one rank. Stateless but for the caches.

    Per layer and step: `project`, `write_global` (KV source layers only, over all rows of the step), then `attend`.
    """

    def __init__(
        self,
        config: ModelConfig,
        caches: KvCaches,
        collectives: Collectives,
        operators: Operators,
        accumulate: torch.dtype,
        device: torch.device,
        probe: Probe,
    ) -> None:
        self._config = config
        self._caches = caches
        self._collectives = collectives
        self._operators = operators
        self._probe = probe
        scaling = config.rope_scaling
        yarn = Yarn(
            scaling.factor, scaling.beta_fast, scaling.beta_slow, scaling.original_max_position_embeddings
        )
        rope_dim = config.qk_rope_head_dim
        self._plain_rope = rope_frequencies(rope_dim, config.rope_theta, None, accumulate).to(device)
        self._compressed_rope = rope_frequencies(rope_dim, config.compress_rope_theta, yarn, accumulate).to(
            device
        )

    def frequencies(self, layer: int) -> Tensor:
        """RoPE frequencies of everything in a layer: `[qk_rope_head_dim // 2]`."""
        return self._compressed_rope if self._config.compress_ratios[layer] else self._plain_rope

    def project(
        self, layer: int, weights: AttentionWeights, x: Tensor, x_q8: Tensor, positions: Tensor
    ) -> Projections:
        """Low-rank queries and window keys of new rows (section 4.2), and what the layer has besides.

        Args:
            layer: its id.
            weights: its weights on this rank.
            x: `[num_rows, hidden]` bf16, normalised input.
            x_q8: the same in Q8.
            positions: `[num_rows]` int64.
        """
        operators = self._operators
        projected = operators.linear(x_q8, weights.low_rank)
        self._probe(layer, "low_rank", projected)
        low_rank, keys = operators.split_low_rank(
            projected,
            weights.q_norm,
            weights.kv_norm,
            positions,
            self.frequencies(layer),
            norm_eps=self._config.rms_norm_eps,
        )
        self._probe(layer, "window_kv", keys.codes)
        self._probe(layer, "window_kv_scales", keys.scales)
        side = None if weights.side is None else operators.linear(x, weights.side)
        return Projections(low_rank, side, keys)

    def write_global(
        self, layer: int, weights: CompressorWeights, projections: Projections, batch: ForwardBatch
    ) -> None:
        """Compress a KV source layer's input into the entries and index keys that this step completes.

        Args:
            layer: the source.
            weights: its compressor.
            projections: of all rows.
            batch: the step.
        """
        config = self._config
        ratio = config.compress_ratios[layer]
        assert projections.side is not None, f"layer {layer} has no compressor"
        compressed = projections.side[:, : ratio * config.head_dim]  # value; at ratio 2 value and gate
        halves = self._caches.halves.get(layer)
        self._operators.write_entries(
            compressed,
            halves,
            batch.encoder.queries,
            batch.encoder.places.first_new,
            batch.half_start,
            batch.entry_rows[ratio],
            weights.norm,
            weights.wk,
            weights.k_norm,
            self.frequencies(layer),
            self._caches.entries[layer],
            self._caches.index_keys[layer],
            ratio=ratio,
            half_ring=half_ring_size(config),
            norm_eps=config.rms_norm_eps,
        )
        if halves is not None:
            self._operators.keep_halves(compressed, halves, batch.half_rows)

    def attend(
        self,
        layer: int,
        weights: AttentionWeights,
        projections: Projections,
        rows: Rows,
        batch: ForwardBatch,
        selection: Selection,
    ) -> Tensor:
        """Attention of one backbone layer; enters its window keys into the ring.

        Args:
            layer: its id.
            weights: its weights on this rank.
            projections: of `rows`, and the keys of all rows that `rows.places` counts.
            rows: the rows that are evaluated.
            batch: the step they belong to.
            selection: picks so far; replaced at index source layers.
        Returns: `[num_rows, hidden]` in the accumulation type, complete on every rank.
        """
        config = self._config
        q, index_q = self._queries(weights, projections.low_rank)
        self._probe(layer, "q", q)
        if weights.has_indexer:
            assert index_q is not None
            assert projections.side is not None
            self._select(layer, index_q, projections.side, rows, batch, selection)
        entries = None
        if config.compress_ratios[layer]:
            assert selection.entry_rows is not None, f"layer {layer} has no index source before it"
            entries = self._caches.entries[config.kv_source_of(layer)]
        ring = self._caches.windows[layer]
        core = self._operators.window_attention(
            q,
            rows.queries,
            rows.places,
            projections.keys,
            ring,
            ring_size=window_ring_size(config),
            window=config.sliding_window,
            entries=entries,
            entry_rows=None if entries is None else selection.entry_rows,
            sinks=weights.sinks,
            frequencies=self.frequencies(layer),
            scale=config.head_dim**-0.5,
        )
        self._probe(layer, "attn_core", core)
        self._operators.keep_keys(projections.keys, ring, rows.ring_rows)
        return self.output(weights, core)

    def _queries(self, weights: AttentionWeights, low_rank: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries before their rotation, the layer's and, where it has one, the indexer's.

        Returns: `[num_rows, local_heads, head_dim]` and `[num_rows, index_n_heads, index_head_dim]`, bf16.
        """
        config = self._config
        product = self._operators.linear(low_rank, weights.queries, out_dtype=torch.bfloat16)
        width = weights.sinks.shape[0] * config.head_dim
        q = product[:, :width].unflatten(1, (-1, config.head_dim))
        if not weights.has_indexer:
            return q, None
        return q, product[:, width:].unflatten(1, (-1, config.index_head_dim))

    def draft_attend(
        self, layer: int, weights: AttentionWeights, x_q8: Tensor, positions: Tensor, ring_rows: Tensor
    ) -> Tensor:
        """Attention of a draft stage: the committed window and the whole block, without a causal mask inside it.

        Args:
            layer: the stage's id.
            weights: its weights on this rank.
            x_q8: `[num_sequences * block, hidden]` bf16, normalised input in Q8.
            positions: `[num_sequences * block]` int64.
            ring_rows: `[num_sequences, window]` int64: the committed window of each sequence, oldest first, -1 where
                there is none.
        Returns: `[num_sequences * block, hidden]` in the accumulation type, complete on every rank.
        """
        projections = self.project(layer, weights, x_q8, x_q8, positions)
        q, _ = self._queries(weights, projections.low_rank)
        core = self._operators.block_attention(
            q,
            positions,
            projections.keys,
            self._caches.windows[layer],
            ring_rows,
            sinks=weights.sinks,
            frequencies=self.frequencies(layer),
            scale=self._config.head_dim**-0.5,
        )
        return self.output(weights, core)

    def commit_draft_keys(self, layer: int, weights: AttentionWeights, x_q8: Tensor, rows: Rows) -> None:
        """Enter the keys of processed rows into a draft stage's ring.

        Args:
            layer: the stage's id.
            weights: its weights.
            x_q8: `[num_rows, hidden]` bf16 in Q8: the stages' common input.
            rows: the rows it belongs to.
        """
        keys = self.project(layer, weights, x_q8, x_q8, rows.queries.positions).keys
        self._operators.keep_keys(keys, self._caches.windows[layer], rows.ring_rows)

    def output(self, weights: AttentionWeights, core: Tensor) -> Tensor:
        """Output projection: `[num_rows, local_heads, head_dim]` to `[num_rows, hidden]` in the accumulation type."""
        operators = self._operators
        grouped = core.flatten(1).unflatten(1, (len(weights.wo_a), -1))
        parts = [operators.linear(grouped[:, g], w, quantize=True) for g, w in enumerate(weights.wo_a)]
        low_rank = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return self._collectives.all_reduce(operators.linear(low_rank, weights.wo_b))

    def _select(
        self,
        layer: int,
        index_q: Tensor,
        side: Tensor,
        rows: Rows,
        batch: ForwardBatch,
        selection: Selection,
    ) -> None:
        """Score the visible entries and replace the picks of `selection` (section 4.5)."""
        config = self._config
        source = config.kv_source_of(layer)
        ratio = config.compress_ratios[layer]
        is_pool_source = layer == config.candidate_source_layer_id
        q = self._operators.index_queries(index_q, rows.queries.positions, self.frequencies(layer))
        scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        head_weights = side[:, -config.index_n_heads :].to(torch.bfloat16) * scale
        selection.entry_rows, pool = self._operators.select_entries(
            q,
            head_weights,
            self._caches.index_keys[source],
            rows.queries,
            batch.block_table,
            ratio=ratio,
            entries_per_block=self._caches.geometry.entries_per_block(ratio),
            num_topk=config.index_topk,
            pool_block=config.candidate_block_size,
            pool=selection.pool,
            make_pool=config.candidate_topk_blocks if is_pool_source else None,
            max_entries=batch.num_positions // ratio,
        )
        if is_pool_source:
            assert pool is not None
            selection.pool = pool
            self._probe(layer, "pool", pool)
        self._probe(layer, "selected", selection.entry_rows)
