"""RoutingCounter: how often the router chooses each expert, counted where it runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.batch import ForwardBatch
from placement.profile import VERSION, Counts, PhaseProfile, Profile

_PREFILL, _DECODE = 0, 1


class RoutingCounter:
    """A Probe of the model that counts routed slots by phase, layer and expert.

    Protocol: `begin_step`, then the forward pass, which calls it; `profile` at any time, from any thread.

    A row of a sequence that has no other row in its step counts as decode, any other as prefill. Decoder layers see
    fewer rows of a prompt than encoder layers if it is replayed.

    Args:
        model_hash: the checkpoint's `content_hash`.
        experts_per_layer: experts of each layer on all ranks, drafts after the backbone.
        device: where the model computes. Counting never waits for it.
    """

    def __init__(self, model_hash: str, experts_per_layer: Sequence[int], device: torch.device) -> None:
        self._model_hash = model_hash
        self._experts_per_layer = tuple(experts_per_layer)
        shape = (2, len(self._experts_per_layer), max(self._experts_per_layer))
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._seen = torch.zeros_like(self._counts[0])
        """What `take_chosen` has told."""
        self._num_tokens = [0, 0]
        self._phases: dict[int, Tensor] = {}
        """Phase of each row, `[num_rows]`, by the number of rows: all of a step's, or those of the decoder."""

    def begin_step(self, batch: ForwardBatch, num_rows: Sequence[int]) -> None:
        """Tell rows apart.

        Args:
            batch: the step.
            num_rows: of each of its sequences.
        """
        is_decode = torch.tensor([n == 1 for n in num_rows], device=self._counts.device)
        phases = is_decode.to(torch.int64)[batch.encoder.queries.sequence]
        self._phases = {len(batch.decoder_rows): phases[batch.decoder_rows], len(phases): phases}
        num_decode = sum(n for n in num_rows if n == 1)
        self._num_tokens[_DECODE] += num_decode
        self._num_tokens[_PREFILL] += sum(num_rows) - num_decode

    def __call__(self, layer: int, name: str, value: Tensor) -> None:
        """See Probe."""
        if name == "topk_idx":
            _, num_layers, num_experts = self._counts.shape
            phase = self._phases[len(value)].unsqueeze(1)
            place = ((phase * num_layers + layer) * num_experts + value).flatten()
            self._counts.view(-1).scatter_add_(0, place, torch.ones_like(place))

    def take_chosen(self) -> Tensor:
        """Experts chosen since the last call: `[num_layers, max_experts]` bool, on the device."""
        total = self._counts.sum(dim=0)
        is_chosen = total > self._seen
        self._seen = total
        return is_chosen

    @property
    def num_tokens(self) -> int:
        """Rows that went through the model since start."""
        return sum(self._num_tokens)

    def rows_by_page(self, first_experts: Sequence[int], experts_per_layer: Sequence[int]) -> Tensor:
        """Rows since start that chose each expert of a rank, layers one after the other.

        Args:
            first_experts: global id of local expert 0, by layer.
            experts_per_layer: local experts.
        Returns: `[sum(experts_per_layer)]` int64, on the device.
        """
        total = self._counts.sum(dim=0)
        local = zip(total, first_experts, experts_per_layer, strict=True)
        return torch.cat([row[first : first + count] for row, first, count in local])

    def profile(self, label: str) -> Profile:
        """What was counted since start, as a profile with one label."""
        counts = self._counts.cpu()
        prefill, decode = (
            PhaseProfile(self._num_tokens[phase], self._rows(counts[phase])) for phase in (_PREFILL, _DECODE)
        )
        num_tokens = prefill.num_tokens + decode.num_tokens
        return Profile(VERSION, self._model_hash, {label: num_tokens}, prefill, decode)

    def _rows(self, counts: Tensor) -> Counts:
        return tuple(
            tuple(row[:num_experts])
            for row, num_experts in zip(counts.tolist(), self._experts_per_layer, strict=True)
        )
