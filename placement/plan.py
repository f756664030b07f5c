"""PlacementPlan: which expert pages of a rank are hot, that is, resident in a device slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


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
    return PlacementPlan(tuple(tuple(range(n)) for n in _even_shares(experts_per_layer, max_resident_pages)))


def host_experts(experts_per_layer: Sequence[int], max_host_pages: int | None) -> tuple[tuple[int, ...], ...]:
    """Which pages the host pool holds if not all: the same share of every layer, its last experts.

    The first ones are those that `spread_evenly` makes hot; they are the last to need the pool.

    Args:
        experts_per_layer: local experts of each layer, at least one in all.
        max_host_pages: bound of their number; None means no bound.
    """
    shares = _even_shares(experts_per_layer, max_host_pages)
    return tuple(tuple(range(n - share, n)) for n, share in zip(experts_per_layer, shares, strict=True))


def _even_shares(experts_per_layer: Sequence[int], max_pages: int | None) -> list[int]:
    """The same share of every layer, `max_pages` in all or every page."""
    num_pages = sum(experts_per_layer)
    num_taken = num_pages if max_pages is None else min(max_pages, num_pages)
    # Rounding the running total, not each share, spends the bound exactly.
    ends = [num_before * num_taken // num_pages for num_before in accumulate(experts_per_layer, initial=0)]
    return [end - start for start, end in pairwise(ends)]
