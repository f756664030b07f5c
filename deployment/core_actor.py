"""EngineCoreActor: the engine core's process. A shell around EngineCore, which owns the shards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.messages import RequestChannel, ShardPlace
from actors.runner_factory import ModelRunnerFactory
from deployment.bundles import Device
from deployment.config import EngineConfig
from deployment.device_fit import fit_devices
from deployment.engine import Engine
from deployment.engine_core import EngineCore
from deployment.executor import ShardSetup, start_executor
from deployment.limits import SchedulerLimits
from deployment.scheduler import Scheduler
from model.config import CheckpointConfig
from placement.engine_plan import EnginePlan

ENGINE_CORE = "engine_core"
"""Name of the actor in its engine's namespace."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine with everything decided that checkpoint and machine decide."""

    config: EngineConfig
    checkpoint: Path
    content_hash: str
    """Of the checkpoint; see `CheckpointLayout`."""
    device: Device
    limits: SchedulerLimits
    """On GPUs `num_blocks` is what fits unless it is set."""
    eos_token_id: int
    vocab_size: int
    plan: EnginePlan | None
    """What `config.shard.placement_plan` names, checked."""


def start_engine_core(placement_group: PlacementGroup, namespace: str) -> ActorHandle:
    """Start the actor in bundle 0 of an engine's placement group; it ends with the process that calls this."""
    actor_class = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(EngineCoreActor)
    bundle = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=0)
    return actor_class.options(name=ENGINE_CORE, namespace=namespace, scheduling_strategy=bundle).remote()


class EngineCoreActor:
    """Starts the shards and runs the engine's loop.

    Protocol: `run`, once; it returns when the request channel says so or the shards are lost, and raises when the
    engine cannot start.
    """

    def __init__(self) -> None:
        logging.basicConfig(level=logging.INFO)

    def run(
        self,
        spec: EngineSpec,
        placement_group: PlacementGroup,
        namespace: str,
        cache: ActorHandle,
        channel: RequestChannel,
    ) -> None:
        """Serve requests until told to stop.

        Args:
            spec: what to run.
            placement_group: of the engine.
            namespace: of its actors' names.
            cache: its ExpertCache.
            channel: to the Engine replica.
        """
        limits = spec.limits

        def set_up(places: Sequence[ShardPlace]) -> ShardSetup:
            nonlocal limits
            checkpoint = CheckpointConfig.load(spec.checkpoint / "config.json")
            free_bytes = [place.free_device_bytes for place in places]
            limits, shard = fit_devices(spec.config, checkpoint, limits, spec.plan, free_bytes)
            create_runner = ModelRunnerFactory(limits.max_num_seqs, limits.num_blocks, limits.block_size)
            return ShardSetup(shard, create_runner)

        executor = start_executor(
            placement_group=placement_group,
            namespace=namespace,
            checkpoint=spec.checkpoint,
            config=spec.config.shard,
            device=spec.device,
            cache=cache,
            verify_checksums=spec.config.expert_cache.verify_checksums,
            set_up=set_up,
            plan=spec.plan,
        )
        engine = Engine(Scheduler(limits, eos_token_id=spec.eos_token_id), executor)
        EngineCore(engine, channel).run()
