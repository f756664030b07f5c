"""KV blocks and resident expert pages of an engine that leaves them open, from the memory of its GPUs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from actors.config import ShardConfig
from deployment.config import EngineConfig
from deployment.errors import SettingsError
from deployment.limits import SchedulerLimits
from model.config import CheckpointConfig
from placement.components import components
from placement.device_memory import (
    DeviceNeeds,
    MemoryPlanError,
    MemorySettings,
    fit_device,
    gib,
    resolve_settings,
)
from placement.engine_plan import EnginePlan
from placement.plan import MIN_STAGING_SLOTS

logger = logging.getLogger(__name__)


def fit_devices(
    config: EngineConfig,
    checkpoint: CheckpointConfig,
    limits: SchedulerLimits,
    plan: EnginePlan | None,
    free_bytes: Sequence[int | None],
) -> tuple[SchedulerLimits, ShardConfig]:
    """Fill in what the settings leave to the GPUs.

    Args:
        config: of the engine.
        checkpoint: the checkpoint's `config.json`.
        limits: of the scheduler, as on CPUs.
        plan: which pages are hot, in place of `shard.max_resident_pages`.
        free_bytes: what each rank can take on its GPU, its CUDA context made; None for a CPU.
    Returns: limits and settings of the shards; as they were if a rank computes on a CPU, whose memory is the host's.
    Raises: SettingsError if what is left open has no room. Where nothing is left open it is tried, and logged.
    """
    known = [free for free in free_bytes if free is not None]
    if len(known) < len(free_bytes):
        return limits, config.shard
    try:
        settings = _memory_settings(config, checkpoint, plan)
        if settings.num_blocks is not None and settings.max_resident_pages is not None:
            _warn_if_short(checkpoint, settings, min(known))
            return limits, config.shard
        division = fit_device(checkpoint, settings, min(known))
    except MemoryPlanError as error:
        raise SettingsError(str(error)) from error
    logger.info(
        "%s of GPU memory: %d KV blocks, %d resident expert pages on each rank",
        *(gib(min(known)), division.num_blocks, division.num_resident_pages),
    )
    shard = config.shard
    if plan is None:
        shard = shard.model_copy(update={"max_resident_pages": division.num_resident_pages})
    return replace(limits, num_blocks=division.num_blocks), shard


def _memory_settings(
    config: EngineConfig, checkpoint: CheckpointConfig, plan: EnginePlan | None
) -> MemorySettings:
    """The settings as a GPU takes them."""
    shard, scheduler = config.shard, config.scheduler
    max_resident_pages = shard.max_resident_pages
    if plan is not None:
        max_resident_pages = max(memory.num_hot_pages for memory in plan.memory)
    return resolve_settings(
        checkpoint.text_config,
        world_size=shard.world_size,
        ep_size=shard.ep_size,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        block_size=scheduler.block_size,
        num_blocks=scheduler.num_blocks,
        num_staging_slots=MIN_STAGING_SLOTS if shard.staging == "direct" else shard.num_staging_slots,
        prefetch_mib=0 if shard.staging == "staged" else shard.prefetch_mib,
        max_resident_pages=max_resident_pages,
        max_host_pages=config.expert_cache.max_host_pages,
    )


def _warn_if_short(checkpoint: CheckpointConfig, settings: MemorySettings, device_bytes: int) -> None:
    """The workspace is an estimate, which does not overrule settings."""
    weights = components(checkpoint, settings.world_size)
    needs = DeviceNeeds.of(checkpoint.text_config, weights, settings)
    if needs.least_bytes > device_bytes:
        logger.warning(
            "%s of GPU memory may be too little by %s: num_blocks and the resident pages are set, see "
            "`python -m placement.memory`",
            *(gib(device_bytes), gib(needs.least_bytes - device_bytes)),
        )
