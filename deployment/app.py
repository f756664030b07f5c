"""build(args): the Serve application of `serve_config.yaml`. Wiring only.

No `from __future__ import annotations` here: Serve validates `args` against the annotation of `build`, and would not
see one that is a string.
"""

from pathlib import Path

import ray
from ray import serve
from ray.serve import Application

from deployment.api_keys import load_api_keys
from deployment.bundles import STRATEGY, placement_bundles, resolve_device
from deployment.config import EngineConfig
from deployment.core_actor import EngineSpec
from deployment.engine_replica import EngineReplica
from deployment.errors import SettingsError
from deployment.ingress import Ingress
from deployment.limits import SchedulerLimits
from deployment.plan_file import load_plan


def build(args: EngineConfig) -> Application:
    """The application for a configuration.

    Raises: pydantic.ValidationError naming the setting; CheckpointError naming file and tensor; SettingsError.
    """
    config = EngineConfig.model_validate(args)
    load_api_keys(config.api)  # each ingress replica reads its own; here, so that mistakes end the start
    spec = resolve(config)
    bundles = placement_bundles(config.shard.world_size, spec.device)
    engine = serve.deployment(
        EngineReplica,
        name="engine",
        num_replicas=1,
        max_ongoing_requests=100_000,  # the engine's own queue decides whom to refuse
        ray_actor_options={"num_cpus": 1},
        placement_group_bundles=bundles,
        placement_group_strategy=STRATEGY,
        health_check_period_s=2,
        # What keeps an engine from starting keeps it from starting again. One that has run is always replaced.
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=20,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=config.api.num_replicas,
        max_ongoing_requests=config.api.max_ongoing_requests,
        ray_actor_options={"num_cpus": 0.1},
    )
    return ingress.bind(engine.bind(spec), spec)


def resolve(config: EngineConfig) -> EngineSpec:
    """Decide what checkpoint and cluster decide; refuses a checkpoint whose files do not fit before anything starts."""
    # Imported here, since every replica imports this module and only the builder needs torch.
    from model.checkpoint_layout import verify_layout
    from model.parallel import ParallelLayout
    from model.tiny import cached_tiny_checkpoint

    checkpoint: Path = config.checkpoint or cached_tiny_checkpoint()
    layout = verify_layout(checkpoint)
    model = layout.config
    world_size = config.shard.world_size
    try:
        ParallelLayout(0, world_size, config.shard.ep_size or world_size).check(model.text_config)
    except ValueError as error:
        raise SettingsError(f"shard: {error}") from error
    return EngineSpec(
        config=config,
        checkpoint=checkpoint.resolve(),
        content_hash=layout.content_hash,
        device=resolve_device(config.shard, ray.cluster_resources().get("GPU", 0)),
        limits=SchedulerLimits.resolve(config.scheduler, model.text_config),
        eos_token_id=model.eos_token_id,
        vocab_size=model.text_config.vocab_size,
        plan=load_plan(config.shard, layout.content_hash, model.text_config),
    )
