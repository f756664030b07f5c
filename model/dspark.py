"""DSpark: a block of draft tokens from the backbone's taps. Source: `spec/model.md` section 8.

Every draft stage keeps a window ring of keys made from the taps of committed positions (`commit`); a draft pass
(`draft`) reads the rings and writes nothing, so it may be repeated or dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.hyper_connections import collapse
from kernels.reference.norm import rms_norm
from kernels.reference.quantize import quantize_q8
from model.batch import Rows
from model.kv_layout import window_ring_size
from model.transformer import Transformer

ChooseTokens = Callable[[Tensor], Tensor]
"""Picks one token per row from draft logits: `[num_sequences, vocab]` to `[num_sequences]` int64."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where one sequence drafts from."""

    state_slot: int
    position: int
    """Last committed position; its taps are in the rings."""
    token_id: int
    """The token sampled from that position's logits, not yet processed."""
    decoder_start: int = 0
    """First position whose taps exist."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens of a batch of sequences."""

    token_ids: Tensor
    """`[num_sequences, block]` int64: for positions `anchor.position + 2 ..`."""
    confidence: Tensor
    """`[num_sequences, block]`, accumulation type: raw score of each draft (a sigmoid makes it a probability)."""
    logits: Tensor
    """`[num_sequences, block, vocab]`, accumulation type: the logits that each draft was chosen from."""


class DSpark:
    """Drafter over a backbone's weights, caches and collectives."""

    def __init__(self, transformer: Transformer) -> None:
        self._backbone = transformer
        self._config = transformer.config
        self._weights = transformer.weights.draft
        self._accumulate = transformer.numerics.accumulate
        config = transformer.config
        self._stages = range(config.num_hidden_layers, config.num_layers_with_drafts)

    def commit(self, taps: Tensor, rows: Rows) -> Tensor:
        """Enter the taps of processed rows into every stage's ring.

        Args:
            taps: `[num_rows, num_targets * hidden]` bf16 from `Hidden.taps`.
            rows: the decoder rows they belong to; rows that a verify rejects are overwritten later.
        Returns: `[num_rows, hidden]` bf16, the stages' common input.
        """
        operators = self._backbone.operators
        projected = operators.linear(quantize_q8(taps), self._weights.main_proj, out_dtype=torch.bfloat16)
        main = rms_norm(projected, self._weights.main_norm, self._config.rms_norm_eps, self._accumulate)
        main_q8 = quantize_q8(main)
        for stage in self._stages:
            weights = self._backbone.weights.layers[stage].attention
            self._backbone.attention.commit_draft_keys(stage, weights, main_q8, rows)
        return main

    def draft(self, anchors: Sequence[Anchor], choose: ChooseTokens) -> Draft:
        """Denoise one block per sequence and choose its tokens left to right.

        Args:
            anchors: one per sequence.
            choose: picks a token per sequence; called once per draft position on every rank with equal logits.
        """
        config, block = self._config, self._config.dspark_block_size
        device = self._weights.main_norm.device
        anchor_tokens = torch.tensor([a.token_id for a in anchors], device=device)
        tokens = torch.full((len(anchors), block), config.dspark_noise_token_id, device=device)
        tokens[:, 0] = anchor_tokens
        last = torch.tensor([a.position for a in anchors], device=device)
        positions = (last.unsqueeze(1) + torch.arange(1, block + 1, device=device)).flatten()
        ring = self._ring_rows(anchors, device)

        stream, pre = self._backbone.embed(tokens.flatten())
        update = None
        for stage in self._stages:
            opened = self._backbone.attention_input(stage, stream, update, pre)
            weights = self._backbone.weights.layers[stage].attention
            y = self._backbone.attention.draft_attend(stage, weights, opened.x_q8, positions, ring)
            stream, update, pre = self._backbone.finish_layer(stage, opened.stream, y, opened.mixes)
        assert update is not None, "a drafter has stages"
        stream = self._backbone.operators.expand(update[0], stream, update[1])
        return self._choose(collapse(stream, pre).unflatten(0, (-1, block)), anchor_tokens, choose)

    def _ring_rows(self, anchors: Sequence[Anchor], device: torch.device) -> Tensor:
        """`[num_sequences, window]` int64: ring rows of the committed window, oldest first, -1 where there is none."""
        size = window_ring_size(self._config)
        slot = torch.tensor([a.state_slot for a in anchors], device=device).unsqueeze(1)
        last = torch.tensor([a.position for a in anchors], device=device).unsqueeze(1)
        start = torch.tensor([a.decoder_start for a in anchors], device=device).unsqueeze(1)
        key = last - torch.arange(self._config.sliding_window - 1, -1, -1, device=device)
        return torch.where(key >= start, slot * size + key % size, -1)

    def _choose(self, hidden: Tensor, anchor_tokens: Tensor, choose: ChooseTokens) -> Draft:
        """Markov-corrected logits, one draft position after the other.

        Args:
            hidden: `[num_sequences, block, hidden]` bf16, before the draft norm.
            anchor_tokens: `[num_sequences]` int64.
            choose: see `draft`.
        """
        weights, accumulate = self._weights, self._accumulate
        operators, gather = self._backbone.operators, self._backbone.collectives.all_gather_last
        normed = rms_norm(hidden, weights.norm, self._config.rms_norm_eps, accumulate)
        previous, tokens, confidence, logits = anchor_tokens, [], [], []
        for i in range(hidden.shape[1]):
            embedded = weights.markov_embed[previous]
            local = operators.linear(normed[:, i], self._backbone.weights.head)
            corrected = gather(local + operators.linear(embedded, weights.markov_head))
            features = torch.cat((hidden[:, i], embedded), dim=-1)
            confidence.append(operators.linear(features, weights.confidence).squeeze(-1))
            previous = choose(corrected)
            tokens.append(previous)
            logits.append(corrected)
        return Draft(torch.stack(tokens, 1), torch.stack(confidence, 1), torch.stack(logits, 1))
