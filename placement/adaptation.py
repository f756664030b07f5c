"""AdaptationPolicy: which pages of a rank change places while traffic changes. The engine and the simulator use it.

The caller tells what was routed (`observe`) and asks between steps for swaps (`propose`), which it carries out: the
admitted page is copied to the slot of the evicted one. The host pool holds every page, so nothing is copied back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

PRIOR_HALF_LIVES: Final = 0.5
"""What a plan's profile counts for when adaptation starts, in half-lives of traffic."""

_Amount = Annotated[float, msgspec.Meta(ge=0)]


class AdaptationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast a hot set follows the traffic."""

    half_life_tokens: Annotated[float, msgspec.Meta(gt=0)] = 2500.0
    """After so many routed rows a count weighs half. Shorter follows faster, longer is less noisy."""
    min_gain: _Amount = 0.2
    """A page comes in only for one that is used less by this share of it."""
    min_sigmas: _Amount = 2.0
    """And only if the difference exceeds this many standard deviations of what chance makes of equal pages."""
    max_bytes_per_s: _Amount = 2e9
    """Copied for swaps, of each rank; 6 % of a link while all ranks read. 0 swaps nothing."""
    max_burst_bytes: _Amount = 2e9
    """Budget that may be saved up while nothing is worth a swap; less than a page swaps nothing."""

    def __post_init__(self) -> None:
        if not (self.half_life_tokens > 0 and self.min_gain >= 0 and self.min_sigmas >= 0):
            raise ValueError(
                f"half_life_tokens must be positive, min_gain and min_sigmas not negative: {self}"
            )
        if not (self.max_bytes_per_s >= 0 and self.max_burst_bytes >= 0):
            raise ValueError(f"max_bytes_per_s and max_burst_bytes must not be negative: {self}")


@dataclass(frozen=True, slots=True)
class Swap:
    """One slot gets another page. Pages are `(layer, local expert)`."""

    evict: tuple[int, int]
    admit: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdaptationState:
    """What can be read from outside."""

    is_paused: bool
    num_hot: int
    num_tokens: int
    """Observed."""
    num_swaps: int
    swapped_bytes: int
    budget_bytes: float
    """That a proposal could spend now."""
    hit_rate: float | None
    """Recency-weighted share of routed slots that the present hot set serves; None before anything was routed."""


class AdaptationPolicy:
    """The hot set of one rank, and what it has seen.

    Invariants: as many pages are hot as in the plan; a page is hot or cold, never both, and a swap exchanges one of
    each; the bytes of all swaps stay within `max_burst_bytes` plus `max_bytes_per_s` times the time that passed.

    Args:
        hot_experts: local experts that are hot, by layer, as in a `PlacementPlan`.
        experts_per_layer: local experts of each layer.
        page_bytes: of one page.
        settings: how fast to follow.
        prior: expected rows by page in one half-life, `[sum(experts_per_layer)]`, from the plan's profile; None
            trusts the plan with nothing.
        is_movable: `[sum(experts_per_layer)]` bool, pages that may change places; None for all.
    Raises: ValueError if an expert does not exist or comes twice.
    """

    def __init__(
        self,
        hot_experts: Sequence[Sequence[int]],
        experts_per_layer: Sequence[int],
        page_bytes: int,
        settings: AdaptationSettings,
        prior: NDArray[np.float64] | None = None,
        is_movable: NDArray[np.bool_] | None = None,
    ) -> None:
        if len(hot_experts) != len(experts_per_layer):
            raise ValueError(
                f"{len(hot_experts)} layers have hot experts, but {len(experts_per_layer)} exist"
            )
        self._first_pages = list(accumulate(experts_per_layer, initial=0))
        self._is_hot = np.zeros(self._first_pages[-1], bool)
        for layer, (hot, num_experts) in enumerate(zip(hot_experts, experts_per_layer, strict=True)):
            if len(set(hot)) != len(hot) or not set(hot) <= set(range(num_experts)):
                raise ValueError(f"hot_experts[{layer}] must be different experts below {num_experts}: {hot}")
            self._is_hot[[self._first_pages[layer] + expert for expert in hot]] = True
        if page_bytes < 1:
            raise ValueError(f"page_bytes must be positive, got {page_bytes}")
        self._page_bytes = page_bytes
        self._settings = settings
        self._is_movable = np.ones(len(self._is_hot), bool) if is_movable is None else is_movable.copy()
        self._scores = np.zeros(len(self._is_hot))
        if prior is not None:
            if prior.shape != self._scores.shape or not np.isfinite(prior).all() or (prior < 0).any():
                raise ValueError(f"prior must be {self._scores.shape} numbers, finite and not negative")
            self._scores += prior
        self._num_hot = int(self._is_hot.sum())
        self._budget_bytes = 0.0
        self._is_paused = False
        self._num_tokens = 0
        self._num_swaps = 0

    @property
    def is_hot(self) -> NDArray[np.bool_]:
        """By page, layers one after the other; a copy."""
        return self._is_hot.copy()

    def hot_experts(self) -> tuple[tuple[int, ...], ...]:
        """The present hot set, in the form of a `PlacementPlan`."""
        pages = [self._page(int(page)) for page in np.flatnonzero(self._is_hot)]
        return tuple(
            tuple(expert for layer_of, expert in pages if layer_of == layer)
            for layer in range(len(self._first_pages) - 1)
        )

    def observe(self, row_counts: NDArray[np.integer], num_tokens: int) -> None:
        """Count what was routed.

        Args:
            row_counts: rows by page since the last call, layers one after the other.
            num_tokens: rows that went through the model meanwhile.
        Raises: ValueError if a shape differs or a number is negative.
        """
        if row_counts.shape != self._scores.shape or num_tokens < 0 or (row_counts < 0).any():
            raise ValueError(
                f"expected {self._scores.shape} counts, none negative, got {row_counts.shape} for {num_tokens} tokens"
            )
        self._scores *= 0.5 ** (num_tokens / self._settings.half_life_tokens)
        self._scores += row_counts
        self._num_tokens += num_tokens

    def propose(self, elapsed_s: float, max_swaps: int | None = None) -> tuple[Swap, ...]:
        """Swaps worth their bytes, the best first. They count as carried out.

        Args:
            elapsed_s: time since the last call, not negative. It passes while the policy is paused, too.
            max_swaps: that the caller can carry out; None for any number.
        """
        if not elapsed_s >= 0:
            raise ValueError(f"elapsed_s must not be negative, got {elapsed_s}")
        self._budget_bytes = min(
            self._budget_bytes + elapsed_s * self._settings.max_bytes_per_s, self._settings.max_burst_bytes
        )
        if self._is_paused:
            return ()
        affordable = int(self._budget_bytes // self._page_bytes)
        hot = np.flatnonzero(self._is_hot & self._is_movable)
        cold = np.flatnonzero(~self._is_hot & self._is_movable)
        max_swaps = min(affordable if max_swaps is None else min(max_swaps, affordable), len(hot), len(cold))
        evicted = hot[_smallest(self._scores[hot], max_swaps)]
        admitted = cold[_smallest(-self._scores[cold], max_swaps)]
        is_better = self._is_better(self._scores[admitted], self._scores[evicted])
        # Gains fall from pair to pair: what follows the first that is not worth it is not worth it either.
        num_swaps = len(is_better) if is_better.all() else int(np.argmin(is_better))
        self._is_hot[evicted[:num_swaps]] = False
        self._is_hot[admitted[:num_swaps]] = True
        self._budget_bytes -= num_swaps * self._page_bytes
        self._num_swaps += num_swaps
        return tuple(
            Swap(self._page(int(evict)), self._page(int(admit)))
            for evict, admit in zip(evicted[:num_swaps], admitted[:num_swaps], strict=True)
        )

    def undo(self, swap: Swap) -> None:
        """A proposed swap cannot be carried out, and its pages stay where they are from now on.

        Its bytes count as spent: finding out was work as well.
        """
        evicted, admitted = self._index(swap.evict), self._index(swap.admit)
        assert self._is_hot[admitted], f"{swap} was not proposed"
        assert not self._is_hot[evicted], f"{swap} was not proposed"
        self._is_hot[evicted], self._is_hot[admitted] = True, False
        self._is_movable[[evicted, admitted]] = False
        self._num_swaps -= 1

    def pause(self) -> None:
        """Propose nothing until `resume`; go on counting."""
        self._is_paused = True

    def resume(self) -> None:
        """Propose again."""
        self._is_paused = False

    def state(self) -> AdaptationState:
        """What the policy has seen and done."""
        total = float(self._scores.sum())
        return AdaptationState(
            is_paused=self._is_paused,
            num_hot=self._num_hot,
            num_tokens=self._num_tokens,
            num_swaps=self._num_swaps,
            swapped_bytes=self._num_swaps * self._page_bytes,
            budget_bytes=self._budget_bytes,
            hit_rate=float(self._scores[self._is_hot].sum()) / total if total else None,
        )

    def check_integrity(self) -> None:
        """Assert that as many pages are hot as in the plan, and that the budget is not overdrawn."""
        num_hot = int(self._is_hot.sum())
        assert num_hot == self._num_hot, f"{num_hot} pages are hot, {self._num_hot} in the plan"
        assert self._budget_bytes >= 0, f"{self._budget_bytes=}"

    def _is_better(self, admit: NDArray[np.float64], evict: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether a cold page with score `admit` should take the place of a hot one with score `evict`."""
        # A recency-weighted count of random arrivals varies by half of what it counts.
        noise = np.sqrt((admit + evict) / 2)
        gain = admit - evict
        return (gain > self._settings.min_gain * admit) & (gain > self._settings.min_sigmas * noise)

    def _index(self, page: tuple[int, int]) -> int:
        return self._first_pages[page[0]] + page[1]

    def _page(self, page: int) -> tuple[int, int]:
        layer = bisect_right(self._first_pages, page) - 1
        return layer, page - self._first_pages[layer]


def _smallest(values: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Where the `count` smallest values are, ascending; ties go to the lower index, so all replicas decide alike.

    Only those are sorted: a rank has thousands of pages.
    """
    if count == 0:
        return np.empty(0, np.intp)
    bound = np.partition(values, count - 1)[count - 1]
    below, at_bound = np.flatnonzero(values < bound), np.flatnonzero(values == bound)
    chosen = np.concatenate((below, at_bound[: count - len(below)]))
    return chosen[np.argsort(values[chosen], kind="stable")]
