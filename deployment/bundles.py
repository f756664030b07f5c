"""Placement of an engine's actors: one machine, one bundle for what runs on its CPU, one for each GPU."""

from __future__ import annotations

import logging
from typing import Literal

from actors.config import ShardConfig

logger = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]

STRATEGY = "STRICT_PACK"
"""Shards share memory with the engine core, so all bundles are on one machine."""


def resolve_device(config: ShardConfig, num_gpus: float) -> Device:
    """What the shards compute on.

    Args:
        config: may leave the choice open.
        num_gpus: GPUs of the Ray cluster.
    """
    if config.device == "auto":
        device: Device = "cuda" if num_gpus >= config.world_size else "cpu"
        logger.info(
            "shards use %s: %g GPUs in the cluster, world_size %d", device, num_gpus, config.world_size
        )
        return device
    return config.device


def placement_bundles(world_size: int, device: Device) -> list[dict[str, float]]:
    """Bundles of an engine's placement group.

    Bundle 0 holds the Engine replica, which asks for one CPU, and the engine core, the expert cache and CPU
    shards, which ask for none: Ray counts CPUs only to place actors, and a machine of two must do.
    """
    gpus = [{"GPU": 1.0}] * world_size if device == "cuda" else []
    return [{"CPU": 1.0}, *gpus]


def shard_bundle(rank: int, device: Device) -> int:
    """Index of a shard's bundle."""
    return rank + 1 if device == "cuda" else 0
