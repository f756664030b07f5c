"""system_fingerprint: a name for everything that decides a reply besides the request. Replies carry it.

Two replies to the same request with the same `seed` are the same if their fingerprints are, on GPUs of one kind. It
does not change with restarts, nor with where experts are, nor with what else the engine works on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import msgspec

from actors.config import ShardConfig
from deployment.bundles import Device
from deployment.version import VERSION

OUTPUT_SETTINGS = frozenset(
    {"world_size", "ep_size", "device", "precision", "expert_activations", "num_threads"}
)
"""Settings of the shards that may change rounding."""
NEUTRAL_SETTINGS = frozenset(
    {
        "max_resident_pages",
        "placement_plan",
        "staging",
        "num_staging_slots",
        "prefetch_mib",
        "allow_unpinned",
        "collective_timeout_s",
        "step_timeout_s",
    }
)
"""The other ones: no bit of a reply depends on where an expert is or on how it gets there."""

_COMPUTING_PACKAGES = ("torch", "triton", "tokenizers", "deepseek-recipe")


def installed_software() -> dict[str, str]:
    """Versions of the engine and of the packages that compute or render for it, where they are installed."""
    software = {"hotset": VERSION}
    for package in _COMPUTING_PACKAGES:
        try:
            software[package] = version(package)
        except PackageNotFoundError:
            continue  # triton, on a machine without a GPU
    return software


def system_fingerprint(
    *,
    model_hash: str,
    shard: ShardConfig,
    device: Device,
    thinks_by_default: bool,
    software: Mapping[str, str],
) -> str:
    """The fingerprint of an engine.

    Args:
        model_hash: of checkpoint and tokenizer.
        shard: how the model is cut and computed.
        device: what it runs on, where `shard.device` leaves that open.
        thinks_by_default: decides the prompt of requests that do not say.
        software: versions by package.
    Returns: `fp_` and 12 hexadecimal digits.
    """
    settings = shard.model_dump(mode="json", include=set(OUTPUT_SETTINGS))
    settings |= {"device": device, "ep_size": shard.ep_size or shard.world_size}
    parts = (model_hash, settings, thinks_by_default, dict(software))
    return "fp_" + hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:12]
