"""ShardGang: the shards' actors, from their placement to the end of their processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.config import ShardConfig
from actors.gpu_shard import GPUShard
from actors.messages import ShardFailure, ShardPlace, ShardStart
from actors.names import CONTROL_GROUP, shard_name
from actors.process import OtherProcess
from deployment.bundles import Device, shard_bundle

if TYPE_CHECKING:
    from actors.shard import RunnerFactory

_PLACE_TIMEOUT_S: Final = 300.0
"""For GPUs to become free and processes to start."""
_INITIALIZE_TIMEOUT_S: Final = 3600.0
"""For every rank to load its part of the model."""
_KILL_TIMEOUT_S: Final = 5.0
"""For processes to end after `ray.kill`, before they get a SIGKILL."""
_GATHER_TIMEOUT_S: Final = 0.5
"""For more ranks to report after the first: the one at fault is not always the first."""


class ShardGang:
    """All shards of an engine. They live and die together.

    Protocol: `place`, `initialize`, `run`; then `wait_for_end` as often as wanted, from any thread; `kill`
    at last, in any state. The actors belong to the process that made the gang, and end with it however it
    ends.

    Args:
        placement_group: with the bundles of `placement_bundles`.
        namespace: of the actors' names, which are `gpu_shard_<rank>`.
        world_size: number of shards.
        device: what they compute on.
    """

    def __init__(
        self, placement_group: PlacementGroup, namespace: str, world_size: int, device: Device
    ) -> None:
        self._actors = [_create_shard(rank, placement_group, namespace, device) for rank in range(world_size)]
        self._processes: list[OtherProcess] = []
        self._runs: list[Any] = []

    def place(self) -> list[ShardPlace]:
        """Wait for the shards' processes. Returns: where they are, by rank."""
        places: list[ShardPlace] = ray.get([a.place.remote() for a in self._actors], timeout=_PLACE_TIMEOUT_S)
        self._processes = [OtherProcess(place.pid) for place in places]
        return places

    def open_store(self, timeout_s: float) -> int | None:
        """Let rank 0 open the store in which all ranks meet. Returns: its port; None if there is one rank."""
        if len(self._actors) == 1:
            return None
        port: int = ray.get(self._actors[0].open_store.remote(timeout_s), timeout=_PLACE_TIMEOUT_S)
        return port

    def initialize(
        self, starts: Sequence[ShardStart], config: ShardConfig, create_runner: RunnerFactory
    ) -> None:
        """Let every shard join the others and load its part of the model; `starts` by rank."""
        done = [
            actor.initialize.remote(start, config, create_runner)
            for actor, start in zip(self._actors, starts, strict=True)
        ]
        ray.get(done, timeout=_INITIALIZE_TIMEOUT_S)

    def run(self) -> None:
        """Let every shard serve steps."""
        self._runs = [actor.run.remote() for actor in self._actors]

    def wait_for_end(self, timeout_s: float) -> str | None:
        """Wait for a shard to end. Returns: which did, and why; None if none did in `timeout_s`."""
        done, _ = ray.wait(self._runs, num_returns=1, timeout=timeout_s)
        if not done:
            return None
        done, _ = ray.wait(self._runs, num_returns=len(self._runs), timeout=_GATHER_TIMEOUT_S)
        reasons = [_why_ended(rank, run) for rank, run in enumerate(self._runs) if run in done]
        return "; ".join(filter(None, reasons)) or "the shards stopped"

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait until every shard has ended, at most `timeout_s`."""
        ray.wait(self._runs, num_returns=len(self._runs), timeout=timeout_s)

    def kill(self) -> None:
        """End every shard's process, whatever it is doing, and wait for that; safe to call twice."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        for process in self._processes:
            if not process.is_gone(max(0.0, deadline - time.monotonic())):
                process.kill()
                process.is_gone(_KILL_TIMEOUT_S)


def _create_shard(rank: int, placement_group: PlacementGroup, namespace: str, device: Device) -> ActorHandle:
    actor_class = ray.remote(
        num_cpus=0,
        num_gpus=1 if device == "cuda" else 0,
        max_restarts=0,
        max_task_retries=0,
        concurrency_groups={CONTROL_GROUP: 1},
    )(GPUShard)
    bundle = PlacementGroupSchedulingStrategy(
        placement_group, placement_group_bundle_index=shard_bundle(rank, device)
    )
    named = actor_class.options(name=shard_name(rank), namespace=namespace, scheduling_strategy=bundle)
    return named.remote(rank)


def _why_ended(rank: int, run: Any) -> str | None:
    """Why a shard's `run()` ended; None if it was told to."""
    try:
        failure: ShardFailure | None = ray.get(run)
    except RayError as error:
        return f"rank {rank} died: {' '.join(str(error).split())}"
    if failure is None:
        return None
    return f"rank {rank} failed in step {failure.step_id}: {failure.error}"
