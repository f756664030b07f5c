"""EngineReplica: the Serve deployment that owns an engine's actors and speaks with its core."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group

from actors.expert_cache import start_expert_cache
from actors.messages import (
    AddRequest,
    EngineHealth,
    EnginePlacement,
    EngineStats,
    RankPlacement,
    RequestError,
    RequestOutput,
    ShardStats,
)
from actors.names import CONTROL_GROUP, shard_name
from deployment.cache_keeper import keep_expert_cache
from deployment.containment import contain_replica
from deployment.core_actor import EngineSpec, start_engine_core
from deployment.engine_client import EngineClient
from deployment.errors import EngineDeadError
from placement.profile import Profile

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
"""For the core to end its shards in order; less than the deployment's graceful_shutdown_timeout_s."""


def shard_warnings(stats: Sequence[ShardStats]) -> list[str]:
    """What is wrong with shards that serve nevertheless."""
    unpinned = [shard.rank for shard in stats if shard.is_pool_pinned is False]
    if not unpinned:
        return []
    return [
        f"the host pool is not registered with CUDA on ranks {unpinned}: cold expert pages are copied slowly"
    ]


class EngineReplica:
    """One engine: expert cache, core and shards, all in this replica's placement group.

    All of them end with this process. When the core ends, for whatever reason, open requests fail, `check_health`
    raises, and Serve replaces the replica.
    """

    async def __init__(self, spec: EngineSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        contain_replica()
        placement_group = get_current_placement_group()
        assert placement_group is not None, "the deployment has no placement group"
        namespace = f"hotset-{serve.get_replica_context().replica_id.unique_id}"
        self._namespace = namespace
        self._world_size = spec.config.shard.world_size
        self._plan = spec.plan
        self._client = EngineClient()
        cache = start_expert_cache(
            placement_group,
            namespace=namespace,
            checkpoint=spec.checkpoint,
            shard=spec.config.shard,
            config=spec.config.expert_cache,
            plan=spec.plan,
        )
        self._core = start_engine_core(placement_group, namespace)
        run = self._core.run.remote(spec, placement_group, namespace, cache, self._client.channel)
        self._watcher = asyncio.create_task(self._watch(run), name="watch-engine-core")
        await self._client.wait_until_ready()
        self._warnings = shard_warnings(await self._shard_stats())
        self._keeper = asyncio.create_task(
            keep_expert_cache(cache, namespace, spec.config.shard.world_size), name="keep-expert-cache"
        )

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request; see `EngineHandle.generate`.

        The first output is empty and comes at once: it says that there is a replica. An engine that is gone is told as
        an output of its own.
        """
        yield RequestOutput(request.request_id)
        try:
            # Closed here and now: an abort must not wait for the garbage collector.
            async with aclosing(self._client.generate(request)) as outputs:
                async for output in outputs:
                    yield output
        except EngineDeadError as error:
            gone = RequestError("unavailable", error.message)
            yield RequestOutput(request.request_id, finish_reason="error", error=gone)

    async def health(self) -> EngineHealth:
        """Whether the engine takes requests."""
        return EngineHealth(self._client.is_alive, self._warnings)

    async def stats(self) -> EngineStats:
        """The engine's newest counts."""
        return self._client.stats

    async def profile(self, label: str) -> Profile:
        """How often each expert was chosen since the engine started."""
        shard = ray.get_actor(shard_name(0), self._namespace)
        profile: Profile = await shard.profile.options(concurrency_group=CONTROL_GROUP).remote(label)
        return profile

    async def placement(self) -> EnginePlacement:
        """Which pages are hot on each rank, and what adaptation does."""
        shards = self._shards()
        ranks: list[RankPlacement] = await asyncio.gather(
            *(shard.placement.options(concurrency_group=CONTROL_GROUP).remote() for shard in shards)
        )
        return EnginePlacement(None if self._plan is None else self._plan.arm, ranks)

    async def pause_adaptation(self, is_paused: bool) -> None:
        """Let the hot sets of all ranks stay as they are, or follow the traffic again."""
        control = {"concurrency_group": CONTROL_GROUP}
        await asyncio.gather(
            *(shard.pause_adaptation.options(**control).remote(is_paused) for shard in self._shards())
        )

    def _shards(self) -> list[ActorHandle]:
        return [ray.get_actor(shard_name(rank), self._namespace) for rank in range(self._world_size)]

    async def _shard_stats(self) -> list[ShardStats]:
        stats: list[ShardStats] = await asyncio.gather(
            *(shard.stats.options(concurrency_group=CONTROL_GROUP).remote() for shard in self._shards())
        )
        return stats

    async def check_health(self) -> None:
        """Raise if the engine is gone; Serve then replaces this replica."""
        if not self._client.is_alive:
            raise EngineDeadError("the engine core has ended")

    async def _watch(self, run: ray.ObjectRef[None]) -> None:
        """Tell the client when the core's `run` has ended, and why."""
        try:
            await run
            reason = "the engine core has stopped"
        except RayError as error:
            reason = str(error)
        self._client.mark_dead(reason)

    async def __del__(self) -> None:
        """Serve's last call: stop the core and with it the shards."""
        if hasattr(self, "_keeper"):
            self._keeper.cancel()
        if hasattr(self, "_client"):
            await self._client.shutdown()
        if hasattr(self, "_watcher"):
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._watcher
