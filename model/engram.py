"""Engram: n-gram look-ups from host tables, injected into the residual stream. Source: `spec/model.md` section 7."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.engram import inject_engram
from kernels.reference.engram_hash import engram_row_ids, map_lookback
from kernels.reference.linear import linear
from kernels.reference.quantize import dequantize_fp8_rows, quantize_q8
from model.collectives import Collectives
from model.config import ModelConfig
from model.engram_map import EngramHash
from model.numerics import Numerics
from model.probe import Probe
from model.weights import EngramWeights


class Engram:
    """Engram of all layers of one rank.

    Args:
        config: dimensions.
        token_map: `[vocab]` int64 on the CPU: compressed id of every token id (section 7.1).
        collectives: over all ranks.
        numerics: accumulation type.
        probe: sees intermediate values.
    """

    def __init__(
        self,
        config: ModelConfig,
        token_map: Tensor,
        collectives: Collectives,
        numerics: Numerics,
        probe: Probe,
    ) -> None:
        self._config = config
        self._token_map = token_map
        self._hash = EngramHash.from_config(config)
        self._collectives = collectives
        self._accumulate = numerics.accumulate
        self._probe = probe

    def row_ids(self, layer: int, lookback: Tensor) -> Tensor:
        """Table rows of every token at a layer.

        Args:
            layer: an Engram layer.
            lookback: `[num_tokens, ngram]` int64 on the CPU: token ids, newest first, -1 before the start.
        Returns: `[num_tokens, num_columns]` int64, on the CPU.
        """
        constants = self._hash.layers[layer]
        mapped = map_lookback(lookback, self._token_map, self._config.engram_pad_token_id)
        return engram_row_ids(mapped, constants.multipliers, constants.moduli, constants.offsets)

    def inject(self, layer: int, weights: EngramWeights, stream: Tensor, lookback: Tensor) -> Tensor:
        """Add the gated look-ups to every copy of the stream.

        Args:
            layer: an Engram layer.
            weights: its weights and this rank's table rows.
            stream: `[num_tokens, m, hidden]` bf16.
            lookback: see `row_ids`.
        Returns: `[num_tokens, m, hidden]` bf16.
        """
        config, accumulate = self._config, self._accumulate
        row_ids = self.row_ids(layer, lookback)
        self._probe(layer, "engram_ids", row_ids)
        rows = row_ids[:, weights.columns] - weights.first_row
        looked_up = dequantize_fp8_rows(weights.codes[rows], weights.scales[rows]).to(torch.bfloat16)
        looked_up = looked_up.flatten(1).to(stream.device)  # [num_tokens, local_columns * engram_head_dim]
        partial = linear(quantize_q8(looked_up), weights.wkv, accumulate)
        projected = (
            self._collectives.all_reduce(partial).to(torch.bfloat16).unflatten(1, (-1, config.hidden_size))
        )
        return inject_engram(
            stream,
            projected[:, : config.hc_mult],
            projected[:, config.hc_mult],
            weights.q_weight,
            weights.k_weight,
            config.rms_norm_eps,
            accumulate,
        )
