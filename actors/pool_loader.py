"""PoolLoader: makes the host pool of every rank, fills it from the checkpoint and keeps it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from threading import Lock
from typing import Final

from actors.disk_speed import read_speed
from actors.host_memory import available_memory_bytes
from actors.host_pool import HostPool, num_host_pages, pool_contents, region_bytes
from actors.messages import CacheStats, PoolRegion
from model.checkpoint import Checkpoint
from model.expert_pages import fill_page, read_scales
from model.parallel import ParallelLayout
from placement.engine_plan import EnginePlan
from placement.plan import PlacementPlan

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S: Final = 5.0
_ALLOCATION_BYTES: Final = 2**30
_DISK_SAMPLE_BYTES: Final = 512 * 2**20


class HostMemoryError(RuntimeError):
    """The machine has too little free memory for the pool."""


class PoolLoader:
    """Owner of the regions of all ranks.

    Protocol: `load`, or `adopt` after another owner has died; from then on `load` returns the same regions. `stats`
    at any time, from any thread. The regions live until `close`, and from then on as long as shards map them.

    Args:
        checkpoint: where the experts come from.
        world_size: ranks; each gets a region.
        ep_size: expert groups among them.
        num_threads: that read from the checkpoint at once.
        max_host_pages: bound of the pages in each region; the others stay in the checkpoint.
        plan: its hot pages are the first that stay there.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        world_size: int,
        ep_size: int,
        num_threads: int,
        max_host_pages: int | None = None,
        plan: EnginePlan | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config.text_config
        self._ranks = [ParallelLayout(rank, world_size, ep_size) for rank in range(world_size)]
        self._contents = [
            pool_contents(
                checkpoint.content_hash,
                self._config,
                parallel,
                max_host_pages,
                None if plan is None else PlacementPlan(plan.of_rank(parallel.rank)),
            )
            for parallel in self._ranks
        ]
        self._num_threads = num_threads
        self._pools: list[HostPool] = []
        self._num_filled_pages = 0
        self._lock = Lock()
        self._speeds: tuple[float | None, float | None] = (None, None)
        """Bytes a second of the last load and of the disk."""

    def load(self, numa_nodes: Sequence[int | None] = ()) -> list[PoolRegion]:
        """Allocate and fill the regions. Returns: rank by rank.

        Args:
            numa_nodes: where each rank's device is, if that matters.
        Raises: HostMemoryError; CheckpointError if an expert cannot be read.
        """
        if not self._pools:
            self._check_memory()
            self._pools = self._filled_pools(numa_nodes or [None] * len(self._ranks))
        return [pool.region for pool in self._pools]

    def adopt(self, regions: Sequence[PoolRegion]) -> list[PoolRegion]:
        """Own regions that shards still map: pages that have their checksum stay, the others are read again.

        Args:
            regions: rank by rank, through processes that map them.
        Returns: the same regions, through this process.
        Raises: AttachError if one is gone or holds something else; CheckpointError.
        """
        contents = zip(regions, self._contents, strict=True)
        pools = [HostPool.adopt(region, expected) for region, expected in contents]
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="check-experts") as threads:
            pages = [
                (rank, page)
                for rank, pool in enumerate(pools)
                for page in filter(pool.holds, range(pool.directory.num_pages))
            ]
            intact = threads.map(lambda at: pools[at[0]].is_intact(at[1]), pages)
            damaged = [at for at, is_intact in zip(pages, intact, strict=True) if not is_intact]
        for rank, page in damaged:
            self._fill_page(pools[rank], self._ranks[rank], page)
        logger.info("expert pool: %d pages adopted, %d of them read again", len(pages), len(damaged))
        self._num_filled_pages = len(pages)
        self._pools = pools
        return self.load()

    def stats(self) -> CacheStats:
        """How far loading is."""
        return CacheStats(
            is_loaded=bool(self._pools),
            num_pages=sum(map(num_host_pages, self._contents)),
            num_filled_pages=self._num_filled_pages,
            num_bytes=sum(map(region_bytes, self._contents)),
            load_bytes_per_s=self._speeds[0],
            disk_bytes_per_s=self._speeds[1],
        )

    def close(self) -> None:
        """Let no more shards map the regions; safe to call twice."""
        for pool in self._pools:
            pool.close()

    def _check_memory(self) -> None:
        needed, available = self.stats().num_bytes, available_memory_bytes()
        if needed > available:
            raise HostMemoryError(
                f"the expert pool needs {_gib(needed)} of host memory, {_gib(available)} are available; "
                "free memory, or set expert_cache.max_host_pages to leave some of it in the checkpoint"
            )

    def _filled_pools(self, numa_nodes: Sequence[int | None]) -> list[HostPool]:
        disk = self._disk_bytes_per_s()
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="load-experts") as threads:
            pools = [HostPool(*made_of) for made_of in zip(self._contents, numa_nodes, strict=True)]
            self._allocate(pools, threads)
            start = time.monotonic()
            self._fill(pools, threads)
        for pool in pools:
            pool.complete()
        speed = self.stats().num_bytes / max(time.monotonic() - start, 1e-6)
        self._speeds = (speed, disk)
        logger.info(
            "expert pool: loaded at %s/s; the disk itself reads %s",
            _gib(speed),
            "at a speed that cannot be measured" if disk is None else f"{_gib(disk)}/s",
        )
        return pools

    def _disk_bytes_per_s(self) -> float | None:
        largest = max(self._checkpoint.files, key=lambda path: path.stat().st_size)
        return read_speed(largest, self._num_threads, _DISK_SAMPLE_BYTES)

    def _allocate(self, pools: Sequence[HostPool], threads: ThreadPoolExecutor) -> None:
        """Let threads take the regions' memory, side by side: one region's is allocated by one thread at a time."""
        largest = max(map(region_bytes, self._contents))
        parts = [
            (pool, offset)
            for offset in range(0, largest, _ALLOCATION_BYTES)
            for pool in pools
            if offset < pool.region.segment.num_bytes
        ]
        futures = [threads.submit(pool.allocate, offset, _ALLOCATION_BYTES) for pool, offset in parts]
        self._wait_for("allocated", futures, threads)

    def _fill(self, pools: Sequence[HostPool], threads: ThreadPoolExecutor) -> None:
        """Read all experts, in the order in which the checkpoint stores them."""
        futures = [
            threads.submit(self._load_expert, pools, layer, expert_id)
            for layer in range(self._config.num_layers_with_drafts)
            for expert_id in range(self._config.num_experts_of(layer))
        ]
        self._wait_for("filled", futures, threads)

    def _wait_for(self, what: str, futures: Sequence[Future[None]], threads: ThreadPoolExecutor) -> None:
        """Wait for all of it and log how far it is; the first failure ends the rest."""
        start = reported = time.monotonic()
        try:
            for num_done, future in enumerate(as_completed(futures), 1):
                future.result()
                if time.monotonic() - reported >= _REPORT_INTERVAL_S or num_done == len(futures):
                    reported = time.monotonic()
                    self._report(what, num_done / len(futures), reported - start)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise

    def _load_expert(self, pools: Sequence[HostPool], layer: int, expert_id: int) -> None:
        """Fill the pages of one expert on all ranks that hold a share."""
        for parallel, pool in zip(self._ranks, pools, strict=True):
            local = parallel.local_experts(self._config.num_experts_of(layer))
            if expert_id not in local:
                continue
            expert = expert_id - local.start
            page = pool.directory.index(layer, expert)
            if not pool.holds(page):
                # It will be read when a request needs it, and must not fail then for what can be seen now.
                read_scales(self._checkpoint, self._config, parallel, layer, expert)
                continue
            self._fill_page(pool, parallel, page)
            with self._lock:
                self._num_filled_pages += 1

    def _fill_page(self, pool: HostPool, parallel: ParallelLayout, page: int) -> None:
        fill_page(pool.page(page), self._checkpoint, self._config, parallel, *pool.directory.locate(page))
        pool.seal(page)

    def _report(self, what: str, share: float, elapsed_s: float) -> None:
        num_bytes = self.stats().num_bytes
        logger.info(
            "expert pool: %.0f %% of %s %s, %s/s",
            100 * share,
            _gib(num_bytes),
            what,
            _gib(share * num_bytes / max(elapsed_s, 1e-3)),
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
