"""Engram: n-gram look-ups from host tables, injected into the residual stream. Source: `spec/model.md` section 7."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.engram_hash import engram_row_ids, map_lookback
from model.collectives import Collectives
from model.config import ModelConfig
from model.engram_map import EngramHash
from model.operators import Operators
from model.probe import Probe
from model.weights import EngramWeights


class Engram:
    """Engram of all layers of one rank.

    Args:
        config: dimensions.
        token_map: `[vocab]` int64: compressed id of every token id (section 7.1).
        collectives: over all ranks.
        operators: that compute.
        device: where.
        probe: sees intermediate values.
    """

    def __init__(
        self,
        config: ModelConfig,
        token_map: Tensor,
        collectives: Collectives,
        operators: Operators,
        device: torch.device,
        probe: Probe,
    ) -> None:
        self._config = config
        self._token_map = token_map.to(device)
        self._hash = {
            layer: (
                constants.multipliers.to(device),
                constants.moduli.to(device),
                constants.offsets.to(device),
            )
            for layer, constants in EngramHash.from_config(config).layers.items()
        }
        self._collectives = collectives
        self._operators = operators
        self._probe = probe

    def row_ids(self, layer: int, lookback: Tensor) -> Tensor:
        """Table rows of every token at a layer.

        Args:
            layer: an Engram layer.
            lookback: `[num_tokens, ngram]` int64: token ids, newest first, -1 before the start.
        Returns: `[num_tokens, num_columns]` int64.
        """
        mapped = map_lookback(lookback, self._token_map, self._config.engram_pad_token_id)
        return engram_row_ids(mapped, *self._hash[layer])

    def inject(self, layer: int, weights: EngramWeights, stream: Tensor, lookback: Tensor) -> Tensor:
        """Add the gated look-ups to every copy of the stream.

        Args:
            layer: an Engram layer.
            weights: its weights and this rank's table rows.
            stream: `[num_tokens, m, hidden]` bf16.
            lookback: see `row_ids`.
        Returns: `[num_tokens, m, hidden]` bf16.
        """
        row_ids = self.row_ids(layer, lookback)
        self._probe(layer, "engram_ids", row_ids)
        operators = self._operators
        rows = row_ids[:, weights.columns] - weights.first_row
        looked_up = operators.gather_rows(rows, weights.codes, weights.scales)
        projected = self._collectives.all_reduce(operators.linear(looked_up, weights.wkv))
        return operators.inject_engram(
            stream, projected, weights.q_weight, weights.k_weight, norm_eps=self._config.rms_norm_eps
        )
