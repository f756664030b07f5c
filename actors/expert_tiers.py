"""TieredExpertSource: hot pages from resident slots, cold ones from the host pool, one table of addresses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from actors.config import ShardConfig
from actors.messages import ExpertTraffic
from actors.page_reader import PageReader
from actors.staging import ColdPages, Copier, DirectPages, StagedPages, create_copier
from kernels.formats import PageLayout, check_page_addresses
from model.expert_source import ExpertPageError, PageGroup
from placement.plan import PlacementPlan


def create_expert_source(
    pages: PageReader, plan: PlacementPlan, config: ShardConfig, device: torch.device
) -> TieredExpertSource:
    """Load the plan's hot pages into device slots and read the others when they are needed.

    Raises: ExpertPageError if a hot page is corrupt; ValueError if `device` cannot read the pool in place.
    """
    if config.staging == "direct" and device.type != "cpu":
        raise ValueError(
            f"staging: direct needs a device that reads the host pool in place; {device} does not"
        )
    copier = create_copier(device)
    resident = load_resident(pages, plan, copier, device)
    cold = _create_cold_pages(pages, config, copier, device)
    return TieredExpertSource(pages, plan, resident, cold)


def _create_cold_pages(
    pages: PageReader, config: ShardConfig, copier: Copier, device: torch.device
) -> ColdPages:
    if config.staging == "direct":
        copier.close()
        return DirectPages(pages.read, pages.directory.num_pages)
    memory = torch.empty(config.num_staging_slots, pages.layout.num_bytes, dtype=torch.uint8, device=device)
    return StagedPages(memory, pages.read, copier)


def load_resident(pages: PageReader, plan: PlacementPlan, copier: Copier, device: torch.device) -> Tensor:
    """Copy the hot pages to the device, layer by layer: `[plan.num_hot, page_bytes]` uint8.

    Raises: ExpertPageError if one is corrupt.
    """
    resident = torch.empty(plan.num_hot, pages.layout.num_bytes, dtype=torch.uint8, device=device)
    hot = [pages.directory.index(layer, e) for layer, hot in enumerate(plan.hot_experts) for e in hot]
    for copy in copier.start([partial(pages.read, page) for page in hot], resident.unbind()):
        copy.join()
    return resident


class TieredExpertSource:
    """The ExpertSource of one rank; that protocol says what callers may rely on.

    A layer's hot experts are the first group, which waits for nothing. The cold ones follow in ascending order,
    in groups of at most half as many pages as can be fetched at once: while one group computes, the pages of the
    next are on their way.

    Invariants:
    - a group is yielded after all its pages were joined, and they are released when the caller comes back;
    - the address of a hot expert never changes.

    Args:
        pages: of the rank.
        plan: which experts are hot.
        resident: `[plan.num_hot, page_bytes]` uint8, the hot pages, layer by layer.
        cold: every other page.
    """

    def __init__(self, pages: PageReader, plan: PlacementPlan, resident: Tensor, cold: ColdPages) -> None:
        self._reader = pages
        self._directory = pages.directory
        self._hot = [frozenset(hot) for hot in plan.hot_experts]
        self._resident = resident  # keeps the memory that the table points to
        self._cold = cold
        self._table = AddressTable(pages.directory.experts_per_layer, resident.device)
        slots = iter(resident)
        for layer, hot in enumerate(plan.hot_experts):
            self._table.update(layer, {expert: next(slots).data_ptr() for expert in hot})
        self._layers = [_Counts() for _ in plan.hot_experts]
        self._reported = ExpertTraffic()
        self._failures: list[str] = []
        self._last: Generator[PageGroup, None, None] | None = None

    @property
    def layout(self) -> PageLayout:
        """See ExpertSource."""
        return self._reader.layout

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[PageGroup]:
        """See ExpertSource."""
        if self._last is not None:
            self._last.close()  # a forward that failed between two groups still holds pages
        self._last = self._stream(layer, split_groups(experts, self._hot[layer], self._cold.max_fetched // 2))
        return self._last

    def traffic_by_layer(self) -> tuple[ExpertTraffic, ...]:
        """Pages and bytes since start; from any thread."""
        return tuple(
            ExpertTraffic(**asdict(counts), num_disk_reads=num_disk_reads)
            for counts, num_disk_reads in zip(self._layers, self._reader.num_disk_reads, strict=True)
        )

    def take_traffic(self) -> ExpertTraffic:
        """Pages and bytes of all layers since the last call."""
        total = sum(self.traffic_by_layer(), start=ExpertTraffic())
        before, self._reported = self._reported, total
        return total - before

    def take_failures(self) -> list[str]:
        """Which pages could not be read, and why, since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """End the copies; safe to call twice."""
        if self._last is not None:
            self._last.close()
        self._cold.close()

    def _stream(self, layer: int, groups: Sequence[Group]) -> Generator[PageGroup, None, None]:
        ahead = deque(groups)
        fetched: set[int] = set()
        failed: set[int] = set()
        try:
            for group in groups:
                while ahead and len(fetched) + len(ahead[0].cold) <= self._cold.max_fetched:
                    pages = self._pages(layer, ahead.popleft())
                    self._fetch(layer, pages)
                    fetched.update(pages)
                failed |= self._join(layer, group)
                yield self._page_group(layer, group, failed)
                for page in fetched.intersection(self._pages(layer, group)):
                    self._cold.release(page)
                    fetched.remove(page)
        finally:
            for page in fetched:
                self._cold.release(page)

    def _fetch(self, layer: int, pages: Sequence[int]) -> None:
        """Begin to make pages readable."""
        fetched = self._cold.fetch(pages)
        self._layers[layer].staged_bytes += fetched.num_bytes
        self._layers[layer].num_evictions += fetched.num_evictions

    def _join(self, layer: int, group: Group) -> set[int]:
        """Wait for a group's cold pages and enter their addresses. Returns: pages that failed."""
        start = time.perf_counter()
        addresses: dict[int, int] = {}
        failed: set[int] = set()
        for expert in group.cold:
            page = self._directory.index(layer, expert)
            try:
                addresses[expert] = self._cold.join(page)
            except ExpertPageError as error:
                self._failures.append(str(error))
                failed.add(page)
        counts = self._layers[layer]
        counts.stall_s += time.perf_counter() - start
        counts.num_cold += len(group.cold)
        counts.num_hot += len(group.experts) - len(group.cold)
        self._table.update(layer, addresses)
        return failed

    def _page_group(self, layer: int, group: Group, failed: Container[int]) -> PageGroup:
        lost = tuple(e for e in group.cold if self._directory.index(layer, e) in failed)
        return PageGroup(
            experts=tuple(e for e in group.experts if e not in lost),
            failed=lost,
            addresses=self._table.row(layer),
        )

    def _pages(self, layer: int, group: Group) -> list[int]:
        return [self._directory.index(layer, expert) for expert in group.cold]


@dataclass(slots=True)
class _Counts:
    """A layer's ExpertTraffic, without what the reader counts."""

    num_hot: int = 0
    num_cold: int = 0
    staged_bytes: int = 0
    num_evictions: int = 0
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """Experts of one layer that are computed together."""

    experts: tuple[int, ...]
    cold: tuple[int, ...]
    """Those of `experts` that are not resident."""


def split_groups(experts: Sequence[int], hot: Container[int], max_cold: int) -> list[Group]:
    """The hot ones of `experts` as one group, then the cold ones, in order, `max_cold` at a time."""
    cold = [expert for expert in experts if expert not in hot]
    groups = [tuple(cold[i : i + max_cold]) for i in range(0, len(cold), max_cold)]
    resident = tuple(expert for expert in experts if expert in hot)
    return [*([Group(resident, ())] if resident else []), *(Group(group, group) for group in groups)]


class AddressTable:
    """The address to read each expert's page from, on the computing device; 0 if never set."""

    def __init__(self, experts_per_layer: Sequence[int], device: torch.device) -> None:
        self._rows = [torch.zeros(count, dtype=torch.int64, device=device) for count in experts_per_layer]
        self._known: list[dict[int, int]] = [{} for _ in experts_per_layer]
        """What the rows hold, on the host."""

    def row(self, layer: int) -> Tensor:
        """`[num_local_experts]` int64."""
        return self._rows[layer]

    def update(self, layer: int, addresses: Mapping[int, int]) -> None:
        """Set experts' addresses, in order with the computation.

        Raises: ValueError for an address that a kernel cannot read.
        """
        check_page_addresses(addresses)
        changed = {e: address for e, address in addresses.items() if self._known[layer].get(e) != address}
        if not changed:
            return
        self._known[layer].update(changed)
        row = self._rows[layer]
        experts, values = _to_device([list(changed), list(changed.values())], row.device)
        row[experts] = values


def _to_device(values: list[list[int]], device: torch.device) -> Tensor:
    """An int64 tensor, copied without waiting for what the device still computes."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
