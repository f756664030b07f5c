"""The fingerprint changes with what changes the output, and with nothing else."""

import re
from typing import Any

import pytest

from actors.config import ShardConfig
from deployment.bundles import Device
from deployment.fingerprint import NEUTRAL_SETTINGS, OUTPUT_SETTINGS, installed_software, system_fingerprint

SOFTWARE = {"hotset": "1", "torch": "2"}


def fingerprint(
    *,
    model_hash: str = "abc",
    device: Device = "cpu",
    thinks_by_default: bool = True,
    software: dict[str, str] | None = None,
    **shard: Any,
) -> str:
    return system_fingerprint(
        model_hash=model_hash,
        shard=ShardConfig(**shard),
        device=device,
        thinks_by_default=thinks_by_default,
        software=software or SOFTWARE,
    )


def test_it_is_short_and_the_same_each_time():
    assert re.fullmatch(r"fp_[0-9a-f]{12}", fingerprint())
    assert fingerprint() == fingerprint()
    # Written down, since it must not change from one process to the next.
    assert fingerprint() == "fp_27b02ada3d7a"


@pytest.mark.parametrize(
    "change",
    [
        {"model_hash": "xyz"},
        {"device": "cuda"},
        {"thinks_by_default": False},
        {"software": {"hotset": "2", "torch": "2"}},
        {"software": {"hotset": "1", "torch": "3"}},
        {"world_size": 4},
        {"ep_size": 1},
        {"precision": "fp64"},
        {"expert_activations": "fp8"},
        {"num_threads": 2},
    ],
)
def test_what_may_change_the_output_changes_it(change: dict[str, Any]):
    assert fingerprint(**change) != fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"max_resident_pages": 3},
        {"staging": "direct"},
        {"num_staging_slots": 9},
        {"prefetch_mib": 0},
        {"step_timeout_s": 1},
        {"device": "cpu"},
        {"ep_size": 2},  # what it is when unset
        {"software": {"torch": "2", "hotset": "1"}},
    ],
)
def test_where_experts_are_does_not_change_it(change: dict[str, Any]):
    assert fingerprint(**change) == fingerprint()


def test_every_setting_of_the_shards_is_known_to_matter_or_not():
    assert not OUTPUT_SETTINGS & NEUTRAL_SETTINGS
    assert set(ShardConfig.model_fields) == OUTPUT_SETTINGS | NEUTRAL_SETTINGS


def test_the_engines_own_version_is_part_of_it():
    assert {"hotset", "torch", "deepseek-recipe"} <= set(installed_software())
