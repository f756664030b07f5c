"""The model on one page: embedding, layers with delayed hyper-connections, head. Source: `spec/model.md` section 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.tensors import Advanced, Mixes
from model.attention import Attention, Selection
from model.batch import ForwardBatch
from model.collectives import Collectives
from model.config import ModelConfig
from model.engram import Engram
from model.expert_source import ExpertSource
from model.kv_cache import KvCaches
from model.moe import MixtureOfExperts
from model.numerics import Numerics
from model.operators import create_operators
from model.parallel import ParallelLayout
from model.probe import Probe, no_probe
from model.weights import HyperConnectionWeights, ModelWeights

Update: TypeAlias = tuple[Tensor, Mixes]
"""A sub-layer's output, `[num_rows, hidden]`, and the mixes by which it enters the stream."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the backbone leaves for the head and the drafter, for the decoder rows of a step."""

    normed: Tensor
    """`[num_rows, hidden]` bf16: input of the head."""
    taps: Tensor
    """`[num_rows, num_targets * hidden]` bf16: DSpark's view of its target layers."""


class Transformer:
    """One rank's part of the model.

    Args:
        config: dimensions.
        weights: this rank's.
        layout: which rank.
        collectives: over all ranks, which call the same methods in the same order.
        experts: this rank's expert pages.
        caches: this rank's.
        token_map: `[vocab]` int64 on the CPU, see `Engram`.
        numerics: accumulation and rounding.
        probe: sees intermediate values.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        layout: ParallelLayout,
        collectives: Collectives,
        experts: ExpertSource,
        caches: KvCaches,
        token_map: Tensor,
        numerics: Numerics,
        probe: Probe = no_probe,
    ) -> None:
        self.config = config
        self.weights = weights
        self.collectives = collectives
        self.numerics = numerics
        self.caches = caches
        device = weights.embed.device
        self.operators = create_operators(numerics)
        self.attention = Attention(
            config, caches, collectives, self.operators, numerics.accumulate, device, probe
        )
        self.moe = MixtureOfExperts(
            config, layout, experts, collectives, self.operators, numerics, device, probe
        )
        self._engram = Engram(config, token_map, collectives, self.operators, device, probe)
        self._vocab = layout.shard(config.vocab_size)
        self._probe = probe

    def forward(self, batch: ForwardBatch) -> Hidden:
        """Run a step's rows through the backbone and extend the caches.

        Rows before a sequence's `decoder_start` end at the decoder's first layer, after their global KV is written.
        """
        config, weights = self.config, self.weights
        rows = batch.encoder
        stream, pre = self.embed(batch.token_ids)
        update: Update | None = None
        selection = Selection()
        taps = []
        for layer in range(config.num_hidden_layers):
            layer_weights = weights.layers[layer]
            if layer > config.decoder_start_layer:
                rows = batch.decoder
            if layer_weights.engram is not None:
                stream, update = self._complete(layer - 1, stream, update), None
                stream = self._engram.inject(layer, layer_weights.engram, stream, batch.lookback)
            self._probe(layer, "pre", pre)
            opened = self.attention_input(layer, stream, update, pre)
            stream, mixes = opened.stream, opened.mixes
            projections = self.attention.project(
                layer, layer_weights.attention, opened.x, opened.x_q8, rows.queries.positions
            )
            if layer_weights.attention.compressor is not None:
                self.attention.write_global(layer, layer_weights.attention.compressor, projections, batch)
            if layer == config.decoder_start_layer:
                rows = batch.boundary
                stream, mixes = stream[batch.decoder_rows], Mixes(*(t[batch.decoder_rows] for t in mixes))
                projections = projections.keep_decoder_rows(batch)
                selection.keep_decoder_rows(batch)
            if layer in config.dspark_target_layer_ids:
                taps.append(self.operators.mean_copies(stream))
            y = self.attention.attend(layer, layer_weights.attention, projections, rows, batch, selection)
            stream, update, pre = self.finish_layer(layer, stream, y, mixes)
        stream = self._complete(config.num_hidden_layers - 1, stream, update)
        normed = self.operators.collapse_norm(stream, pre, weights.norm, norm_eps=config.rms_norm_eps)
        return Hidden(normed, torch.cat(taps, dim=-1))

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream and first collapse weights of new tokens.

        Returns: `[num_tokens, m, hidden]` bf16, all copies equal, and `[num_tokens, m]` one-hot on copy 0.
        """
        local = token_ids - self._vocab.start
        is_local = (local >= 0) & (local < self.weights.embed.shape[0])
        rows = self.weights.embed[torch.where(is_local, local, 0)]
        rows = self.collectives.all_reduce(torch.where(is_local.unsqueeze(-1), rows, torch.zeros_like(rows)))
        stream = rows.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(
            token_ids.shape[0], self.config.hc_mult, dtype=self.numerics.accumulate, device=stream.device
        )
        pre[:, 0] = 1
        return stream, pre

    def attention_input(self, layer: int, stream: Tensor, update: Update | None, pre: Tensor) -> Advanced:
        """What a layer's attention sees, and the stream with what the sub-layer before it has to add.

        Args:
            layer: layer id, draft stages after the backbone.
            stream: `[num_rows, m, hidden]` bf16.
            update: of the sub-layer before; None if it is in the stream already.
            pre: `[num_rows, m]`: collapse weights that it left.
        """
        weights = self.weights.layers[layer]
        opened = self._advance(stream, update, pre, weights.hc_attn, weights.attn_norm)
        if update is not None:
            self._probe(layer - 1, "stream_out", opened.stream)
        self._probe(layer, "stream_in", opened.stream)
        self._probe(layer, "attn_norm_out", opened.x)
        return opened

    def finish_layer(
        self, layer: int, stream: Tensor, y: Tensor, mixes: Mixes
    ) -> tuple[Tensor, Update, Tensor]:
        """Everything after a layer's attention.

        Args:
            layer: layer id, draft stages after the backbone.
            stream: `[num_rows, m, hidden]` bf16, the layer's input (after Engram).
            y: `[num_rows, hidden]`, the attention's output.
            mixes: the attention's.
        Returns: the stream before the experts' output, that output with its mixes, and the collapse weights for the
            next layer.
        """
        weights = self.weights.layers[layer]
        self._probe(layer, "attn_out", y)
        # The sub-layer's own pre weights collapse the input of the *next* sub-layer.
        opened = self._advance(stream, (y, mixes), mixes.pre, weights.hc_ffn, weights.ffn_norm)
        self._probe(layer, "stream_mid", opened.stream)
        following = self.weights.layers[layer + 1].moe if layer + 1 < self.config.num_hidden_layers else None
        y = self.moe.forward(layer, weights.moe, opened.x, opened.x_q8, following)
        self._probe(layer, "moe_out", y)
        return opened.stream, (y, opened.mixes), opened.mixes.pre

    def _advance(
        self,
        stream: Tensor,
        update: Update | None,
        pre: Tensor,
        weights: HyperConnectionWeights,
        norm: Tensor,
    ) -> Advanced:
        return self.operators.advance(
            stream,
            update,
            pre,
            weights.fn,
            weights.base,
            weights.scale,
            norm,
            sinkhorn_iters=self.config.hc_sinkhorn_iters,
            hc_eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
        )

    def _complete(self, layer: int, stream: Tensor, update: Update | None) -> Tensor:
        """The stream after a layer, `update` included."""
        if update is None:
            return stream
        stream = self.operators.expand(update[0], stream, update[1])
        self._probe(layer, "stream_out", stream)
        return stream

    def logits(self, normed: Tensor) -> Tensor:
        """Next-token logits.

        Args:
            normed: `[num_rows, hidden]` bf16.
        Returns: `[num_rows, vocab]` in the accumulation type, on every rank.
        """
        return self.collectives.all_gather_last(self.operators.linear(normed, self.weights.head))
