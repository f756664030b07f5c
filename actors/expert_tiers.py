"""TieredExpertSource: hot pages from resident slots, cold ones from the host pool, one table of addresses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from actors.config import ShardConfig
from actors.group_stream import GroupStream
from actors.in_place import InPlaceLayers
from actors.messages import ExpertTraffic
from actors.page_loading import check_pages, load_pages
from actors.page_prefetch import MAX_PAIRS, PagePrefetcher
from actors.page_reader import PageReader
from actors.page_uses import PageUses
from actors.pinned_memory import PinnedMemory
from actors.prefetch_trial import PrefetchTrial
from actors.staging import ColdPages, Copier, DirectPages, StagedPages, create_copier
from kernels.formats import PageLayout
from model.expert_source import PageGroup
from placement.plan import MIN_STAGING_SLOTS, PlacementPlan, default_num_staging_slots


def create_expert_source(
    pages: PageReader,
    plan: PlacementPlan,
    config: ShardConfig,
    device: torch.device,
    *,
    pinned: PinnedMemory | None = None,
) -> TieredExpertSource:
    """Load the plan's hot pages into device slots and read the others when they are needed.

    Args:
        pages: of the rank.
        plan: which are hot.
        config: how cold ones are read.
        device: that computes.
        pinned: the pool, if it is registered with CUDA, so that a GPU reads it in place; a CPU does anyway.
    Raises: ExpertPageError if a hot page is corrupt; ValueError if pages cannot be read as `config` wants.
    """
    can_read_pool = device.type == "cpu" or pinned is not None
    if config.staging == "direct" and not can_read_pool:
        raise ValueError(
            "shard.staging is direct, but the host pool is not registered with CUDA; set staged or auto"
        )
    copier = create_copier(device, pinned)
    hot = [pages.directory.index(layer, e) for layer, hot in enumerate(plan.hot_experts) for e in hot]
    resident = load_pages(pages, hot, copier, device)
    reads_in_place = (
        can_read_pool and config.staging != "staged" and (device.type == "cuda" or config.staging == "direct")
    )
    if reads_in_place and device.type == "cuda":
        check_pages(pages, sorted(set(range(pages.directory.num_pages)).difference(hot)), copier, device)
    in_place = InPlaceLayers(pages, device, can_read_pool=reads_in_place)
    cold = _create_cold_pages(pages, config, copier, device)
    prefetcher = _create_prefetcher(pages, config, plan, in_place) if reads_in_place else None
    return TieredExpertSource(
        pages, plan, resident, cold, in_place, prefetcher, math.inf if config.staging == "direct" else 0
    )


def _create_cold_pages(
    pages: PageReader, config: ShardConfig, copier: Copier, device: torch.device
) -> ColdPages:
    if config.staging == "direct" and device.type == "cpu":
        copier.close()
        return DirectPages(pages.read, pages.directory.num_pages)
    largest_layer = max(pages.directory.experts_per_layer)
    num_slots = config.num_staging_slots or default_num_staging_slots(pages.layout.num_bytes, largest_layer)
    if config.staging == "direct":
        num_slots = MIN_STAGING_SLOTS  # for layers with a page that cannot be read in place
    memory = torch.empty(num_slots, pages.layout.num_bytes, dtype=torch.uint8, device=device)
    return StagedPages(memory, pages.read, copier)


def _create_prefetcher(
    pages: PageReader, config: ShardConfig, plan: PlacementPlan, in_place: InPlaceLayers
) -> PagePrefetcher | None:
    num_slots = int(config.prefetch_mib * 2**20) // pages.layout.num_bytes
    if num_slots == 0 or plan.num_hot == pages.directory.num_pages:
        return None
    num_slots = min(num_slots, max(pages.directory.experts_per_layer))
    return PagePrefetcher(pages.first_experts, in_place.is_cold, num_slots, pages.layout.num_bytes)


class TieredExpertSource:
    """The ExpertSource of one rank; that protocol says what callers may rely on.

    Steps of up to `max_rows_in_place` rows read the layers that allow it in place; others, and layers with a page on
    disk or a damaged one, get their pages group by group.

    Invariant: a page is hot, and then in exactly one slot of `resident`, or cold. Which it is changes between two
    steps only, by `make_cold` and `make_hot`.

    Args:
        pages: of the rank.
        plan: which experts are hot.
        resident: `[plan.num_hot, page_bytes]` uint8, the hot pages, layer by layer.
        cold: every other page.
        in_place: what the device can read where it is.
        prefetcher: for the layers that are read in place; None if nothing is prefetched.
        max_rows_in_place: of a step that reads cold pages in place.
    """

    def __init__(
        self,
        pages: PageReader,
        plan: PlacementPlan,
        resident: Tensor,
        cold: ColdPages,
        in_place: InPlaceLayers,
        prefetcher: PagePrefetcher | None = None,
        max_rows_in_place: float = 0,
    ) -> None:
        self._reader = pages
        slots = iter(resident.unbind())
        self._hot = [{expert: next(slots) for expert in hot} for hot in plan.hot_experts]
        """By layer and local expert: the slot of each hot page."""
        self._in_place = in_place
        self._prefetcher = prefetcher
        self._trial = PrefetchTrial()
        self._is_prefetching = False
        self.max_rows_in_place = max_rows_in_place
        """Steps of more rows stage the cold pages. May change between two steps."""
        self._groups = GroupStream(pages.directory, cold, resident.device)
        self._uses = PageUses(pages.first_experts, in_place.is_cold, pages.directory.experts_per_layer)
        self._read_in_place = [False] * len(plan.hot_experts)
        """Layers that were, in this step."""
        self._reported = ExpertTraffic()
        self._changed = set(range(len(self._hot)))
        """Layers whose hot set is not published yet."""
        self.publish()

    @property
    def prefetches(self) -> bool:
        """Whether steps may prefetch at all."""
        return self._prefetcher is not None

    @property
    def layout(self) -> PageLayout:
        """See ExpertSource."""
        return self._reader.layout

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[PageGroup]:
        """See ExpertSource."""
        return self._groups.stream(layer, experts)

    def in_place(self, layer: int, num_rows: int) -> PageGroup | None:
        """See ExpertSource."""
        addresses = self._in_place.addresses[layer]
        if addresses is None or not (self._in_place.is_resident[layer] or num_rows <= self.max_rows_in_place):
            return None
        if self._prefetcher is not None:
            addresses = self._prefetcher.join(layer, addresses)
        self._read_in_place[layer] = True
        return PageGroup(experts=range(len(addresses)), failed=(), addresses=addresses)

    def coldest_layer_in_place(self) -> int | None:
        """Of the layers that can be read in place, that with the most cold pages; None if no cold page can be."""
        cold = [
            (len(addresses) - len(self._hot[layer]), -layer)
            for layer, addresses in enumerate(self._in_place.addresses)
            if addresses is not None and not self._in_place.is_resident[layer]
        ]
        return -max(cold)[1] if cold else None

    def wants_prediction(self, layer: int, num_rows: int) -> bool:
        """See ExpertSource."""
        return (
            self._is_prefetching
            and self._in_place.addresses[layer] is not None
            and not self._in_place.is_resident[layer]
            and num_rows <= self.max_rows_in_place
        )

    def predict(self, layer: int, topk_idx: Tensor) -> None:
        """See ExpertSource."""
        addresses = self._in_place.addresses[layer]
        assert self._prefetcher is not None, "nothing is prefetched here"
        assert addresses is not None, f"{layer=}"
        if topk_idx.numel() <= MAX_PAIRS:
            self._prefetcher.start(layer, topk_idx, addresses)

    @contextmanager
    def step(self, num_decode_rows: int | None, chosen: Callable[[], Tensor]) -> Iterator[None]:
        """A step, which has ended on the device as well when the block ends.

        Args:
            num_decode_rows: how many if the step has no others and is worth timing, else None.
            chosen: `[num_layers, max_experts]` bool on the device: experts chosen since it was called before; called
                once, after the step.
        """
        is_timed = num_decode_rows is not None and self._prefetcher is not None
        self._is_prefetching = is_timed and self._trial.begin(num_decode_rows or 0)
        start = time.perf_counter()
        yield
        if is_timed:
            self._trial.end(num_decode_rows or 0, time.perf_counter() - start)
        is_chosen = chosen()
        if any(self._read_in_place):
            prefetched = (
                self._prefetcher.was_prefetched if self._prefetcher and self._is_prefetching else None
            )
            self._uses.add(is_chosen, self._read_in_place, prefetched)
            self._read_in_place = [False] * len(self._read_in_place)
            if prefetched is not None and self._prefetcher is not None:
                self._prefetcher.clear()

    def page_in_pool(self, page: tuple[int, int]) -> Tensor | None:
        """See HotPages."""
        return self._reader.in_place(self._reader.directory.index(*page))

    def make_cold(self, page: tuple[int, int]) -> Tensor:
        """See HotPages."""
        layer, expert = page
        self._changed.add(layer)
        return self._hot[layer].pop(expert)

    def make_hot(self, page: tuple[int, int], slot: Tensor) -> None:
        """See HotPages."""
        layer, expert = page
        assert expert not in self._hot[layer], f"{page=}"
        self._hot[layer][expert] = slot
        self._changed.add(layer)

    def publish(self) -> None:
        """See HotPages."""
        for layer in self._changed:
            addresses = {expert: slot.data_ptr() for expert, slot in self._hot[layer].items()}
            self._groups.set_hot(layer, addresses)
            self._in_place.update(layer, addresses)
        self._changed.clear()

    @property
    def experts_per_layer(self) -> tuple[int, ...]:
        """Local experts."""
        return self._reader.directory.experts_per_layer

    def hot_experts(self) -> tuple[tuple[int, ...], ...]:
        """Local experts with a resident page, by layer; from any thread."""
        return tuple(tuple(sorted(hot)) for hot in self._hot)

    def traffic_by_layer(self) -> tuple[ExpertTraffic, ...]:
        """Pages and bytes since start; from any thread."""
        page_bytes = self.layout.num_bytes
        return tuple(
            ExpertTraffic(
                num_hot=counts.num_hot + uses.num_hot,
                num_cold=counts.num_cold + uses.num_cold,
                num_disk_reads=num_disk_reads,
                staged_bytes=counts.staged_bytes,
                direct_bytes=(uses.num_cold - uses.num_prefetched_useful) * page_bytes,
                num_evictions=counts.num_evictions,
                num_prefetched_useful=uses.num_prefetched_useful,
                num_prefetched_wasted=uses.num_prefetched_wasted,
                stall_s=counts.stall_s,
            )
            for counts, uses, num_disk_reads in zip(
                self._groups.counts, self._uses.by_layer(), self._reader.num_disk_reads, strict=True
            )
        )

    def take_traffic(self) -> ExpertTraffic:
        """Pages and bytes of all layers since the last call."""
        total = sum(self.traffic_by_layer(), start=ExpertTraffic())
        before, self._reported = self._reported, total
        return total - before

    def take_failures(self) -> list[str]:
        """Which pages could not be read, and why, since the last call."""
        return self._groups.take_failures()

    def close(self) -> None:
        """End the copies; safe to call twice."""
        self._groups.close()
