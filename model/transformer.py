"""The model on one page: embedding, layers with delayed hyper-connections, head. Source: `spec/model.md` section 3."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.hyper_connections import Mixes, collapse, compute_mixes, expand
from kernels.reference.linear import linear
from kernels.reference.norm import rms_norm
from model.attention import Attention, Selection
from model.batch import ForwardBatch
from model.collectives import Collectives
from model.config import ModelConfig
from model.engram import Engram
from model.expert_source import ExpertSource
from model.kv_cache import KvCaches
from model.moe import MixtureOfExperts
from model.numerics import Numerics
from model.parallel import ParallelLayout
from model.probe import Probe, no_probe
from model.weights import HyperConnectionWeights, ModelWeights


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
        self.attention = Attention(config, caches, collectives, numerics, device, probe)
        self.moe = MixtureOfExperts(config, layout, experts, collectives, numerics, device, probe)
        self._engram = Engram(config, token_map, collectives, numerics, probe)
        self._vocab = layout.shard(config.vocab_size)
        self._probe = probe

    def forward(self, batch: ForwardBatch) -> Hidden:
        """Run a step's rows through the backbone and extend the caches.

        Rows before a sequence's `decoder_start` end at the decoder's first layer, after their global KV is written.
        """
        config, weights = self.config, self.weights
        rows = batch.encoder
        stream, pre = self.embed(batch.token_ids)
        selection = Selection()
        taps = []
        for layer in range(config.num_hidden_layers):
            layer_weights = weights.layers[layer]
            if layer > config.decoder_start_layer:
                rows = batch.decoder
            if layer_weights.engram is not None:
                stream = self._engram.inject(layer, layer_weights.engram, stream, batch.lookback)
            self._probe(layer, "stream_in", stream)
            self._probe(layer, "pre", pre)
            x = self.attention_input(layer, stream, pre)
            if layer_weights.attention.compressor is not None:
                self.attention.write_global(layer, layer_weights.attention.compressor, x, batch)
            kv = self.attention.window_kv(layer, layer_weights.attention, x, rows.positions)
            if layer == config.decoder_start_layer:
                rows = batch.boundary
                stream, x = stream[batch.decoder_rows], x[batch.decoder_rows]
                selection.keep_decoder_rows(batch)
            if layer in config.dspark_target_layer_ids:
                taps.append(stream.to(self.numerics.accumulate).mean(dim=1).to(torch.bfloat16))
            y = self.attention.attend(layer, layer_weights.attention, x, kv, rows, batch, selection)
            stream, pre = self.finish_layer(layer, stream, y)
        return Hidden(self._final_norm(stream, pre), torch.cat(taps, dim=-1))

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

    def attention_input(self, layer: int, stream: Tensor, pre: Tensor) -> Tensor:
        """Normalised input of a layer's attention: `[num_rows, hidden]` bf16."""
        norm = self.weights.layers[layer].attn_norm
        x = rms_norm(collapse(stream, pre), norm, self.config.rms_norm_eps, self.numerics.accumulate)
        self._probe(layer, "attn_norm_out", x)
        return x

    def finish_layer(self, layer: int, stream: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Everything after a layer's attention.

        Args:
            layer: layer id, draft stages after the backbone.
            stream: `[num_rows, m, hidden]` bf16, the layer's input (after Engram).
            y: `[num_rows, hidden]` bf16, the attention's output.
        Returns: the layer's output stream and the collapse weights for the next layer.
        """
        weights = self.weights.layers[layer]
        attention_mixes = self._mixes(weights.hc_attn, stream)
        self._probe(layer, "attn_out", y)
        stream = expand(y, stream, attention_mixes)
        self._probe(layer, "stream_mid", stream)
        # The sub-layer's own pre weights collapse the input of the *next* sub-layer.
        ffn_mixes = self._mixes(weights.hc_ffn, stream)
        x = collapse(stream, attention_mixes.pre)
        x = rms_norm(x, weights.ffn_norm, self.config.rms_norm_eps, self.numerics.accumulate)
        following = self.weights.layers[layer + 1].moe if layer + 1 < self.config.num_hidden_layers else None
        y = self.moe.forward(layer, weights.moe, x, following)
        self._probe(layer, "moe_out", y)
        stream = expand(y, stream, ffn_mixes)
        self._probe(layer, "stream_out", stream)
        return stream, ffn_mixes.pre

    def _mixes(self, weights: HyperConnectionWeights, stream: Tensor) -> Mixes:
        return compute_mixes(
            stream,
            weights.fn,
            weights.base,
            weights.scale,
            sinkhorn_iters=self.config.hc_sinkhorn_iters,
            hc_eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
            accumulate=self.numerics.accumulate,
        )

    def _final_norm(self, stream: Tensor, pre: Tensor) -> Tensor:
        hidden = collapse(stream, pre)
        return rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps, self.numerics.accumulate)

    def logits(self, normed: Tensor) -> Tensor:
        """Next-token logits.

        Args:
            normed: `[num_rows, hidden]` bf16.
        Returns: `[num_rows, vocab]` in the accumulation type, on every rank.
        """
        return self.collectives.all_gather_last(linear(normed, self.weights.head, self.numerics.accumulate))
