"""RayExecutor: all shards as one.

Ray creates, places and watches their processes. A step is one message in a shared-memory ring and one reply.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from actors.config import ShardConfig
from actors.heartbeats import HeartbeatWatch
from actors.messages import ShardAdaptation, ShardPlace, ShardStart, StepInput, StepOutput, StopShards
from actors.shm_ring import RingError
from actors.step_channel import CoreEnd
from deployment.bundles import STRATEGY, Device
from deployment.errors import SettingsError, ShardsLostError
from deployment.shard_gang import ShardGang
from placement.engine_plan import EnginePlan

if TYPE_CHECKING:
    from actors.shard import RunnerFactory

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S: Final = 1.0
_STOP_TIMEOUT_S: Final = 10.0
"""For shards to leave their group when they are told to stop."""
_LOAD_TIMEOUT_S: Final = 3600.0
"""For the expert cache to fill the pool."""


@dataclass(frozen=True, slots=True)
class ShardSetup:
    """What is decided about the shards once it is known where they are."""

    config: ShardConfig
    create_runner: RunnerFactory
    """Builds each shard's StepRunner, in its process."""


class Gang(Protocol):
    """What the executor needs of ShardGang once the shards run."""

    def wait_for_end(self, timeout_s: float) -> str | None:
        """Wait for a shard to end. Returns: which did, and why; None if none did in `timeout_s`."""

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait until every shard has ended, at most `timeout_s`."""

    def kill(self) -> None:
        """End every shard's process and wait for that; safe to call twice."""


def start_executor(
    *,
    placement_group: PlacementGroup,
    namespace: str,
    checkpoint: Path,
    config: ShardConfig,
    device: Device,
    cache: ActorHandle,
    verify_checksums: bool,
    set_up: Callable[[Sequence[ShardPlace]], ShardSetup],
    plan: EnginePlan | None = None,
) -> RayExecutor:
    """Start the shards of an engine. They belong to the calling process and end with it.

    Args:
        placement_group: of the engine, with the bundles of `placement_bundles`.
        namespace: of the engine's actors.
        checkpoint: folder.
        config: of the shards, as far as it is decided before they are placed.
        device: what `config.device` was resolved to.
        cache: the engine's ExpertCache; it loads the pool if it has not yet.
        verify_checksums: check each page when a shard first reads it.
        set_up: decides the rest, from where they are, by rank.
        plan: which pages are hot, checked against the rest; None: as `config.max_resident_pages` says.
    Returns: the executor, when every shard is ready for steps.
    Raises: what kept the cache or a shard from it; no shard is left then.
    """
    channel = CoreEnd(config.world_size)
    gang = ShardGang(placement_group, namespace, config.world_size, device)
    try:
        places = gang.place()
        _check_one_machine(places)
        setup = set_up(places)
        loading = cache.load.remote([place.numa_node for place in places])
        store_port = gang.open_store(config.collective_timeout_s)
        starts = [
            ShardStart(
                world_size=config.world_size,
                ep_size=config.ep_size or config.world_size,
                device=device,
                checkpoint=str(checkpoint),
                store_port=store_port,
                region=region,
                verify_checksums=verify_checksums,
                channel=channel.channel,
                hot_experts=None if plan is None else plan.of_rank(rank),
                adaptation=_adaptation_of(plan, rank),
            )
            for rank, region in enumerate(ray.get(loading, timeout=_LOAD_TIMEOUT_S))
        ]
        gang.initialize(starts, setup.config, setup.create_runner)
        gang.run()
    except BaseException:
        channel.close()
        gang.kill()
        raise
    return RayExecutor(gang, channel, config.step_timeout_s)


def _adaptation_of(plan: EnginePlan | None, rank: int) -> ShardAdaptation | None:
    if plan is None or plan.adaptation is None or (rates := plan.rates_of_rank(rank)) is None:
        return None
    return ShardAdaptation(plan.adaptation.settings, rates)


def _check_one_machine(places: Sequence[ShardPlace]) -> None:
    here = ray.get_runtime_context().get_node_id()
    for place in places:
        logger.info("shard %d: process %d, GPUs %s", place.rank, place.pid, place.gpu_ids)
        if place.node_id != here:
            raise SettingsError(
                f"shard {place.rank} is on node {place.node_id}, the engine core on {here}, but they share "
                f"memory: the placement group needs the strategy {STRATEGY}"
            )


class RayExecutor:
    """The Executor over a gang of shards that run; see that protocol.

    One thread calls `execute` and `shutdown`. Another, inside, watches the shards' `run()` and, between
    steps, their heartbeats. Whichever notices first that a shard is lost ends all of them.

    Invariant: once `execute` has raised or `shutdown` has returned, no process of a shard is left.

    Args:
        gang: the shards; the executor ends them.
        channel: to them.
        step_timeout_s: a step without a reply for this long means that they are stuck.
        heartbeat_timeout_s: so does this long a silence of a shard that waits for a step.
    """

    def __init__(
        self, gang: Gang, channel: CoreEnd, step_timeout_s: float, heartbeat_timeout_s: float = 30.0
    ) -> None:
        self._gang = gang
        self._channel = channel
        self._step_timeout_s = step_timeout_s
        self._heartbeats = HeartbeatWatch(heartbeat_timeout_s)
        self._is_idle = True
        self._is_stopping = threading.Event()
        self._end_reason: str | None = None
        self._end_lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="watch-shards", daemon=True)
        self._watcher.start()

    def execute(self, step: StepInput) -> StepOutput:
        """See Executor."""
        self._is_idle = False
        try:
            self._channel.send(step, self._step_timeout_s)
            output = self._channel.receive(self._step_timeout_s)
        except RingError as error:
            # A shard that has ended knows better than the ring why there is no reply.
            reason = self._gang.wait_for_end(_WATCH_INTERVAL_S) or str(error)
            raise ShardsLostError(self._end(f"step {step.step_id}: {reason}")) from error
        assert output.step_id == step.step_id, f"{output.step_id=} {step.step_id=}"
        self._is_idle = True
        return output

    def check(self) -> None:
        """See Executor."""
        if self._end_reason is not None:
            raise ShardsLostError(self._end_reason)

    def shutdown(self) -> None:
        """See Executor."""
        if not self._is_stopping.is_set():
            self._is_stopping.set()
            self._stop()
        self._end("the shards were shut down")
        self._watcher.join()

    def _stop(self) -> None:
        """Let the shards leave their group by themselves."""
        try:
            self._channel.send(StopShards(), _STOP_TIMEOUT_S)
            self._gang.wait_for_all(_STOP_TIMEOUT_S)
        except RingError as error:
            logger.warning("the shards do not take the message to stop: %s", error)

    def _end(self, reason: str) -> str:
        """End the shards unless that is done. Returns: why they ended."""
        with self._end_lock:
            if self._end_reason is None:
                self._is_stopping.set()
                self._end_reason = reason
                self._channel.close()
                self._gang.kill()
            return self._end_reason

    def _watch(self) -> None:
        while not self._is_stopping.is_set():
            reason = self._gang.wait_for_end(_WATCH_INTERVAL_S) or self._silence()
            if reason is not None and not self._is_stopping.is_set():
                logger.error("lost the shards: %s", reason)
                self._end(reason)

    def _silence(self) -> str | None:
        ranks = self._heartbeats.stuck_ranks(
            self._channel.heartbeats(), is_idle=self._is_idle, now=time.monotonic()
        )
        return f"ranks {ranks} gave no sign of life" if ranks else None
