"""keep_expert_cache: an ExpertCache that died and was started again gets its pool back from the shards."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.messages import CacheStats
from actors.names import CONTROL_GROUP, shard_name

logger = logging.getLogger(__name__)

_POLL_S: Final = 2.0


async def keep_expert_cache(cache: ActorHandle, namespace: str, world_size: int) -> None:
    """Watch the cache of an engine that runs, until cancelled.

    Nothing waits for it: shards go on with the pool that they map. What fails is tried again.

    Args:
        cache: the actor, which Ray restarts.
        namespace: of the engine's actors.
        world_size: number of shards.
    """
    while True:
        await asyncio.sleep(_POLL_S)
        try:
            stats: CacheStats = await cache.stats.options(concurrency_group=CONTROL_GROUP).remote()
            if stats.is_loaded:
                continue
            shards = [ray.get_actor(shard_name(rank), namespace) for rank in range(world_size)]
            regions = await asyncio.gather(
                *(shard.region.options(concurrency_group=CONTROL_GROUP).remote() for shard in shards)
            )
            await cache.adopt.remote(regions)
            logger.warning("the expert cache died; the new one has the pool from the shards")
        except (RayError, ValueError) as error:  # ValueError: a shard has no actor any more
            logger.warning("the expert cache cannot be reached: %s", error)
