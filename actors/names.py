"""What the actors are called in Ray. Each engine has a namespace of its own, so engines do not meet."""

EXPERT_CACHE = "expert_cache"

CONTROL_GROUP = "control"
"""Concurrency group of the calls that an actor answers while it works: `stats`, `check_health`."""


def shard_name(rank: int) -> str:
    """Name of the GPUShard of a rank."""
    return f"gpu_shard_{rank}"
