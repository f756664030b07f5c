"""ExpertCache: the actor that owns the host pool. A shell around PoolLoader."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.config import ExpertCacheConfig, ShardConfig
from actors.messages import CacheStats, PoolRegion
from actors.names import CONTROL_GROUP, EXPERT_CACHE
from placement.engine_plan import EnginePlan

if TYPE_CHECKING:
    from actors.pool_loader import PoolLoader


def start_expert_cache(
    placement_group: PlacementGroup,
    *,
    namespace: str,
    checkpoint: Path,
    shard: ShardConfig,
    config: ExpertCacheConfig,
    plan: EnginePlan | None = None,
) -> ActorHandle:
    """Start the actor in bundle 0 of an engine's placement group; it ends with the process that calls this.

    Args:
        placement_group: of the engine.
        namespace: of the engine's actors.
        checkpoint: folder.
        shard: world and expert layout.
        config: of the cache.
        plan: which pages are hot in the shards, if that is known.
    Returns: the actor; `load` is the first thing to call.
    """
    actor_class = ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups={CONTROL_GROUP: 1})(ExpertCache)
    bundle = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=0)
    named = actor_class.options(name=EXPERT_CACHE, namespace=namespace, scheduling_strategy=bundle)
    return named.remote(checkpoint, shard, config, plan)


class ExpertCache:
    """Control plane of the expert pages; no step calls it.

    Protocol: `load` first, which may take minutes; again after shards were lost, which returns the same
    regions. `stats` and `check_health` at any time, in CONTROL_GROUP. `shutdown` last,
    once or twice. Shards that map the pool keep it when this actor dies; Ray starts it again, and whoever
    watches it hands the regions back with `adopt`.
    """

    def __init__(
        self, checkpoint: Path, shard: ShardConfig, config: ExpertCacheConfig, plan: EnginePlan | None
    ) -> None:
        logging.basicConfig(level=logging.INFO)
        self._checkpoint = checkpoint
        self._shard = shard
        self._config = config
        self._plan = plan
        self._loader: PoolLoader | None = None

    def load(self, numa_nodes: list[int | None]) -> list[PoolRegion]:
        """Fill the pool, each region where its rank's GPU is. Returns: each rank's region.

        Raises: CheckpointError; HostMemoryError.
        """
        return self._create_loader().load(numa_nodes)

    def adopt(self, regions: list[PoolRegion]) -> list[PoolRegion]:
        """Take over the pool from a cache that died. Returns: each rank's region, through this process.

        Raises: AttachError if a region is gone or holds something else; CheckpointError.
        """
        return self._create_loader().adopt(regions)

    def _create_loader(self) -> PoolLoader:
        # Imported here, since whoever starts this actor imports this module and has no use for torch.
        from actors.pool_loader import PoolLoader
        from model.checkpoint import Checkpoint

        if self._loader is None:
            checkpoint = Checkpoint.open(self._checkpoint)
            self._loader = PoolLoader(
                checkpoint,
                self._shard.world_size,
                self._shard.ep_size or self._shard.world_size,
                self._config.num_load_threads,
                self._config.max_host_pages,
                self._plan,
            )
        return self._loader

    def stats(self) -> CacheStats:
        """How far loading is; zeros before the checkpoint is open."""
        return CacheStats() if self._loader is None else self._loader.stats()

    def check_health(self) -> None:
        """Return if the actor is alive."""

    def shutdown(self) -> None:
        """Give up the pool."""
        if self._loader is not None:
            self._loader.close()
