"""GroupStream: a layer's pages group by group, while copies for later groups and the next layer are under way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Container, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from actors.address_mailbox import AddressMailbox
from actors.page_directory import PageDirectory
from actors.staging import ColdPages
from model.expert_source import ExpertPageError, PageGroup

_ENOUGH: Final = 7 / 8
"""Of a layer's cold pages: who needs so many will need most of the next layer's, too."""


@dataclass(slots=True)
class GroupCounts:
    """One layer's pages and copies since start."""

    num_hot: int = 0
    num_cold: int = 0
    staged_bytes: int = 0
    num_evictions: int = 0
    stall_s: float = 0.0


class GroupStream:
    """What `ExpertSource.stream` is made of; that protocol says what callers may rely on.

    A layer's hot experts are the first group, which waits for nothing. The cold ones follow, in groups of at most half
    as many pages as can be fetched at once: while one group computes, the pages of the next are on their way. A layer
    that needs nearly all of its cold pages (a prefill) is followed by one that does: what room its last groups leave
    is filled with pages of the layer that came after it last time, so that the link never waits for a routing.

    Invariants:
    - a group is yielded after all its pages were joined, and they are released when the caller comes back;
    - pages that were fetched for a layer ahead of its `stream` are released by the next `stream` at the latest.

    Args:
        directory: of the rank's pages; all are cold at first.
        cold: every other page.
        device: that computes.
    """

    def __init__(self, directory: PageDirectory, cold: ColdPages, device: torch.device) -> None:
        num_layers = len(directory.experts_per_layer)
        self._directory = directory
        self._hot: list[frozenset[int]] = [frozenset()] * num_layers
        self._cold_experts: list[tuple[int, ...]] = [()] * num_layers
        self._cold = cold
        self._mailbox = AddressMailbox(max(directory.experts_per_layer), device)
        self._hot_members = [self._members(layer, {}) for layer in range(num_layers)]
        """Of each layer: where its hot pages are, and which they are."""
        self.counts = [GroupCounts() for _ in range(num_layers)]
        """By layer."""
        self._failures: list[str] = []
        self._running: Generator[PageGroup, None, None] | None = None
        self._last_layer: int | None = None
        self._next_layer: dict[int, int] = {}
        """Which layer was streamed after each one, the last time."""
        self._ahead: tuple[int, list[int]] = (0, [])
        """A layer that was not streamed yet, and those of its experts whose pages are fetched."""
        for layer in range(num_layers):
            self.set_hot(layer, {})

    def set_hot(self, layer: int, hot: Mapping[int, int]) -> None:
        """Say which pages of a layer are resident; between two forwards.

        Args:
            layer: whose hot set is new.
            hot: address by expert.
        """
        self._end_forward()
        self._hot[layer] = frozenset(hot)
        num_local = self._directory.experts_per_layer[layer]
        self._cold_experts[layer] = tuple(e for e in range(num_local) if e not in hot)
        self._hot_members[layer] = self._members(layer, hot)

    def _members(self, layer: int, hot: Mapping[int, int]) -> tuple[Tensor, Tensor]:
        addresses = self._mailbox.send(hot, self._directory.experts_per_layer[layer])
        return addresses, addresses != 0

    def _end_forward(self) -> None:
        """Release what a forward has left: pages that were fetched ahead, and those of one that failed."""
        if self._running is not None:
            self._running.close()
        self._take_ahead(0, ())

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[PageGroup]:
        """See ExpertSource."""
        if self._running is not None:
            self._running.close()  # a forward that failed between two groups still holds pages
        if self._last_layer is not None and self._last_layer < layer:
            self._next_layer[self._last_layer] = layer
        self._last_layer = layer
        ahead = self._take_ahead(layer, experts)
        groups = split_groups(experts, self._hot[layer], self._cold.max_fetched // 2, ahead)
        self._running = self._stream(layer, groups, ahead)
        return self._running

    def take_failures(self) -> list[str]:
        """Which pages could not be read, and why, since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """End the copies; safe to call twice."""
        self._end_forward()
        self._cold.close()

    def _stream(
        self, layer: int, groups: Sequence[Group], ahead: Collection[int]
    ) -> Generator[PageGroup, None, None]:
        held = set(ahead)
        to_fetch = deque(tuple(e for e in group.cold if e not in held) for group in groups)
        needs_most = sum(len(group.cold) for group in groups) >= _ENOUGH * len(self._cold_experts[layer])
        try:
            for group in groups:
                while to_fetch and len(held) + len(to_fetch[0]) <= self._cold.max_fetched:
                    experts = to_fetch.popleft()
                    self._fetch(layer, experts)
                    held.update(experts)
                if not to_fetch and needs_most:
                    self._fetch_ahead(layer, self._cold.max_fetched - len(held))
                yield self._join(layer, group)
                self._release(layer, group.cold)
                held.difference_update(group.cold)
            if needs_most:
                self._fetch_ahead(layer, self._cold.max_fetched)
        finally:
            self._release(layer, held)

    def _fetch(self, layer: int, experts: Sequence[int]) -> None:
        """Begin to make pages readable."""
        fetched = self._cold.fetch([self._directory.index(layer, e) for e in experts])
        self.counts[layer].staged_bytes += fetched.num_bytes
        self.counts[layer].num_evictions += fetched.num_evictions

    def _fetch_ahead(self, layer: int, room: int) -> None:
        """Begin to make pages of the next layer readable, at most `room` with those that are."""
        following = self._next_layer.get(layer)
        if following is None:
            return
        experts = self._ahead[1]
        more = self._cold_experts[following][len(experts) : room]
        self._fetch(following, more)
        self._ahead = (following, [*experts, *more])

    def _take_ahead(self, layer: int, experts: Collection[int]) -> tuple[int, ...]:
        """Experts of a layer whose pages were fetched ahead; others that were are released."""
        (ahead_layer, fetched), self._ahead = self._ahead, (0, [])
        needed = frozenset(experts) if ahead_layer == layer else frozenset()
        self._release(ahead_layer, [e for e in fetched if e not in needed])
        return tuple(e for e in fetched if e in needed)

    def _release(self, layer: int, experts: Collection[int]) -> None:
        for expert in experts:
            self._cold.release(self._directory.index(layer, expert))

    def _join(self, layer: int, group: Group) -> PageGroup:
        """Wait for a group's cold pages and tell the device where they are."""
        counts = self.counts[layer]
        counts.num_cold += len(group.cold)
        counts.num_hot += len(group.experts) - len(group.cold)
        if not group.cold:
            addresses, is_member = self._hot_members[layer]
            return PageGroup(group.experts, failed=(), addresses=addresses, is_member=is_member)
        start = time.perf_counter()
        found: dict[int, int] = {}
        failed: list[int] = []
        for expert in group.cold:
            try:
                found[expert] = self._cold.join(self._directory.index(layer, expert))
            except ExpertPageError as error:
                self._failures.append(str(error))
                failed.append(expert)
        counts.stall_s += time.perf_counter() - start
        addresses = self._mailbox.send(found, self._directory.experts_per_layer[layer])
        return PageGroup(tuple(found), tuple(failed), addresses, is_member=addresses != 0)


@dataclass(frozen=True, slots=True)
class Group:
    """Experts of one layer that are computed together."""

    experts: tuple[int, ...]
    cold: tuple[int, ...]
    """Those of `experts` that are not resident."""


def split_groups(
    experts: Sequence[int], hot: Container[int], max_cold: int, first: Collection[int] = ()
) -> list[Group]:
    """The hot ones of `experts` as one group, then the cold ones, `max_cold` at a time, those in `first` first."""
    placed = frozenset(first)
    cold = [*first, *(expert for expert in experts if expert not in hot and expert not in placed)]
    groups = [tuple(cold[i : i + max_cold]) for i in range(0, len(cold), max_cold)]
    resident = tuple(expert for expert in experts if expert in hot)
    return [*([Group(resident, ())] if resident else []), *(Group(group, group) for group in groups)]
