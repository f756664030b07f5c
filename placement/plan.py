"""PlacementPlan: which expert pages of a rank are hot, that is, resident in a device slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The hot set of one rank; every other page is cold and read from the host pool.

    Invariant: the experts of a layer ascend.
    """

    hot_experts: tuple[tuple[int, ...], ...]
    """Local indices of each layer's hot experts; drafts after the backbone."""

    @property
    def num_hot(self) -> int:
        """Device slots that the plan takes."""
        return sum(map(len, self.hot_experts))


def spread_evenly(experts_per_layer: Sequence[int], max_resident_pages: int | None) -> PlacementPlan:
    """Plan without a profile: the same share of every layer is hot, its first experts.

    Args:
        experts_per_layer: local experts of each layer, at least one in all.
        max_resident_pages: bound of `num_hot`; None means no bound.
    Returns: a plan that uses the whole bound, as far as there are pages.
    """
    num_pages = sum(experts_per_layer)
    num_hot = num_pages if max_resident_pages is None else min(max_resident_pages, num_pages)
    hot_experts = []
    num_before = 0
    for num_experts in experts_per_layer:
        # Rounding the running total, not each share, spends the bound exactly.
        num_after = num_before + num_experts
        first, last = num_before * num_hot // num_pages, num_after * num_hot // num_pages
        hot_experts.append(tuple(range(last - first)))
        num_before = num_after
    return PlacementPlan(tuple(hot_experts))
