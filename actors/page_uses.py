"""PageUses: which pages were read in place, counted where the routing is known and the host is not told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerUses:
    """Pages of one layer, each counted once a step."""

    num_hot: int
    num_cold: int
    """Prefetched ones included."""
    num_prefetched_useful: int
    num_prefetched_wasted: int


class PageUses:
    """Adds up page uses step by step, without waiting for the device until someone asks.

    Args:
        first_experts: global id of local expert 0, by layer.
        is_cold: `[num_layers, max_local]` bool, on the device.
        experts_per_layer: local experts.
    """

    def __init__(
        self, first_experts: Sequence[int], is_cold: Tensor, experts_per_layer: Sequence[int]
    ) -> None:
        device = is_cold.device
        self._is_cold = is_cold
        local = torch.arange(is_cold.shape[1], device=device)
        self._experts = torch.tensor(first_experts, device=device).unsqueeze(1) + local
        self._is_local = local < torch.tensor(experts_per_layer, device=device).unsqueeze(1)
        self._counts = torch.zeros(len(first_experts), 4, dtype=torch.int64, device=device)

    def add(self, is_chosen: Tensor, layers: Sequence[bool], was_prefetched: Tensor | None) -> None:
        """Count a step.

        Args:
            is_chosen: `[num_layers, max_experts]` bool: experts, by global id, that the step chose.
            layers: which layers read their pages in place.
            was_prefetched: `[num_layers, max_local]` bool: pages that were copied on a guess; None if none were.
        """
        is_counted = self._is_local & torch.tensor(layers).to(self._is_local.device).unsqueeze(1)
        last = is_chosen.shape[1] - 1
        used = is_chosen.gather(1, self._experts.clamp(max=last)) & is_counted
        kinds = [used & ~self._is_cold, used & self._is_cold]
        if was_prefetched is not None:
            kinds += [was_prefetched & used, was_prefetched & ~used]
        self._counts[:, : len(kinds)] += torch.stack([kind.sum(dim=1) for kind in kinds], dim=1)

    def by_layer(self) -> list[LayerUses]:
        """All uses since start; waits for the steps that were added."""
        return [LayerUses(*counts) for counts in self._counts.tolist()]
