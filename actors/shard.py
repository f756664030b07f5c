"""Shard: everything one rank consists of, put together. The actor around it is `actors/gpu_shard.py`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.config import ShardConfig
from actors.cuda_driver import CudaDriver
from actors.expert_tiers import TieredExpertSource, create_expert_source
from actors.host_pool import MappedPool, pool_contents
from actors.messages import PoolRegion, RankPlacement, ShardFailure, ShardStart, ShardStats
from actors.page_reader import PageReader, fill_from
from actors.page_swaps import PageSwapper, RoutedCounts
from actors.pinned_memory import PinDriver, PinError, PinnedMemory
from actors.process_group import connect_store, join_group, leave_group, open_store
from actors.routing_counter import RoutingCounter
from actors.rows_in_place import measure_rows_in_place
from actors.shard_loop import ShardLoop, StepRunner
from actors.staging import Copier, create_copier
from actors.step_channel import ShardEnd
from model.checkpoint import Checkpoint
from model.collectives import Collectives
from model.parallel import ParallelLayout
from placement.adaptation import PRIOR_HALF_LIVES, AdaptationPolicy
from placement.plan import PlacementPlan, spread_evenly
from placement.profile import Profile

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardContext:
    """What a rank's StepRunner is built from."""

    config: ShardConfig
    checkpoint: Checkpoint
    layout: ParallelLayout
    collectives: Collectives
    experts: TieredExpertSource
    routing: RoutingCounter
    device: torch.device


RunnerFactory = Callable[[ShardContext], StepRunner]
"""Builds a rank's runner in its process; travels there by pickle."""


class Shard:
    """One rank.

    Protocol: rank 0 opens the store, if there are other ranks; then `initialize` on all ranks at once,
    since they wait for each other; then `run`, once. `stats`, `profile` and `region` at any time after
    `initialize`, from any thread.

    Args:
        rank: this shard's.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: TCPStore | None = None
        self._parts: _Parts | None = None

    def free_device_bytes(self) -> int:
        """What this process can still take on its GPU, once its CUDA context is made, which this does."""
        free_bytes: int = torch.cuda.mem_get_info(0)[0]
        return free_bytes

    def open_store(self, timeout_s: float) -> int:
        """Open the store in which all ranks meet. Returns: its port on the loopback interface."""
        self._store = open_store(timeout_s)
        port: int = self._store.port
        return port

    def initialize(self, start: ShardStart, config: ShardConfig, create_runner: RunnerFactory) -> None:
        """Join the other ranks, map the pool, load this rank's part of the model.

        Raises: what is wrong with the checkpoint, the pool or the peers.
        """
        torch.set_num_threads(config.num_threads)
        device = torch.device("cuda", 0) if start.device == "cuda" else torch.device("cpu")
        layout = ParallelLayout(self._rank, start.world_size, start.ep_size)
        collectives = self._join_group(start, layout, device, config.collective_timeout_s)
        checkpoint = Checkpoint.open(Path(start.checkpoint))
        text = checkpoint.config.text_config
        # How much the region holds is the cache's choice; what it holds must be ours.
        held = start.region.contents
        expected = msgspec.structs.replace(
            pool_contents(checkpoint.content_hash, text, layout),
            max_host_pages=held.max_host_pages,
            hot_pages=held.hot_pages,
        )
        pool = MappedPool(
            start.region,
            expected,
            verify_checksums=start.verify_checksums,
            writable=device.type == "cuda",
        )
        pinned = None
        if device.type == "cuda":
            torch.zeros(1, device=device)  # makes the context that the driver registers for
            pinned = pin_pool(pool, CudaDriver(), allow_unpinned=config.allow_unpinned)
        pages = PageReader(pool, fill_from(checkpoint, layout, pool.directory))
        if start.hot_experts is None:
            plan = spread_evenly(pool.directory.experts_per_layer, config.max_resident_pages)
        else:
            plan = PlacementPlan(start.hot_experts)
        experts = create_expert_source(pages, plan, config, device, pinned=pinned)
        if device.type == "cuda" and config.staging == "auto":
            experts.max_rows_in_place = measure_rows_in_place(experts, text, layout, device)
        num_experts = [text.num_experts_of(layer) for layer in range(text.num_layers_with_drafts)]
        routing = RoutingCounter(checkpoint.content_hash, num_experts, device)
        swapper = _create_swapper(start, pages, plan, experts, routing, create_copier(device, pinned))
        context = ShardContext(config, checkpoint, layout, collectives, experts, routing, device)
        runner = create_runner(context)
        self._parts = _Parts(
            loop=ShardLoop(self._rank, ShardEnd(start.channel, self._rank), runner, experts, swapper),
            experts=experts,
            routing=routing,
            swapper=swapper,
            num_pages=pool.directory.num_pages,
            num_hot_pages=plan.num_hot,
            region=pool.region,
            num_host_pages=len(pool.pages),
            pinned=pinned,
            is_pool_pinned=None if device.type == "cpu" else pinned is not None,
        )

    def run(self) -> ShardFailure | None:
        """Serve steps until told to stop, then leave the group. Returns: why this rank cannot go on, or None.

        After a failure nothing is tidied up: with peers that are gone it could take forever, and this
        process will be killed.
        """
        parts = self._initialized()
        failure = parts.loop.run()
        if failure is None:
            parts.experts.close()
            if parts.swapper is not None:
                parts.swapper.close()
            if parts.pinned is not None:
                parts.pinned.close()
            leave_group()
        return failure

    def region(self) -> PoolRegion:
        """The host pool's region of this rank, through this process."""
        return self._initialized().region

    def profile(self, label: str) -> Profile:
        """How often each expert was chosen since start; the same on all ranks."""
        return self._initialized().routing.profile(label)

    def placement(self) -> RankPlacement:
        """Where this rank's pages are now."""
        parts = self._initialized()
        news = None if parts.swapper is None else parts.swapper.news()
        return RankPlacement(self._rank, tuple(map(len, parts.experts.hot_experts())), news)

    def pause_adaptation(self, is_paused: bool) -> None:
        """Let the hot set stay as it is, or follow the traffic again."""
        swapper = self._initialized().swapper
        if swapper is not None:
            swapper.set_paused(is_paused)

    def stats(self) -> ShardStats:
        """What this rank holds and has done."""
        parts = self._initialized()
        return ShardStats(
            rank=self._rank,
            num_steps=parts.loop.num_steps,
            num_pages=parts.num_pages,
            num_hot_pages=parts.num_hot_pages,
            num_host_pages=parts.num_host_pages,
            is_pool_pinned=parts.is_pool_pinned,
            layers=parts.experts.traffic_by_layer(),
        )

    def _join_group(
        self, start: ShardStart, layout: ParallelLayout, device: torch.device, timeout_s: float
    ) -> Collectives:
        if start.store_port is None:
            return Collectives(layout)
        store = self._store or connect_store(start.store_port, timeout_s)
        return join_group(store, layout, device, timeout_s)

    def _initialized(self) -> _Parts:
        assert self._parts is not None, f"rank {self._rank} is not initialized"
        return self._parts


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `initialize` leaves."""

    loop: ShardLoop
    experts: TieredExpertSource
    routing: RoutingCounter
    swapper: PageSwapper | None
    num_pages: int
    num_hot_pages: int
    region: PoolRegion
    num_host_pages: int
    pinned: PinnedMemory | None
    is_pool_pinned: bool | None


def _create_swapper(
    start: ShardStart,
    pages: PageReader,
    plan: PlacementPlan,
    experts: TieredExpertSource,
    routing: RoutingCounter,
    copier: Copier,
) -> PageSwapper | None:
    """What lets the hot set of a rank follow the traffic; None if it stays as planned."""
    if start.adaptation is None:
        copier.close()
        return None
    counts = pages.directory.experts_per_layer
    settings = start.adaptation.settings
    rates = np.array([rate for row in start.adaptation.rates for rate in row])
    policy = AdaptationPolicy(
        plan.hot_experts,
        counts,
        pages.layout.num_bytes,
        settings,
        prior=rates * settings.half_life_tokens * PRIOR_HALF_LIVES,
        is_movable=np.array([pages.is_in_pool(page) for page in range(pages.directory.num_pages)]),
    )
    routed = RoutedCounts(
        partial(routing.rows_by_page, pages.first_experts, counts), lambda: routing.num_tokens
    )
    return PageSwapper(experts, policy, routed, copier)


def pin_pool(pool: MappedPool, driver: PinDriver, *, allow_unpinned: bool) -> PinnedMemory | None:
    """Register a rank's pages with its GPU, after which this process cannot write them any more.

    Returns: what to close at the end; None if it failed and may.
    Raises: PinError if it failed and may not.
    """
    pinned = None
    try:
        pinned = PinnedMemory(pool.pages, driver)
    except PinError as error:
        if not allow_unpinned:
            raise
        logger.warning("copies will be slow: %s", error)
    pool.make_read_only()
    return pinned
