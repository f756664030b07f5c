"""What an engine makes of its GPUs' memory. No GPU here: their memory is a number."""

import logging
from pathlib import Path
from typing import Any

import pytest

from actors.config import ShardConfig
from deployment.config import EngineConfig, SchedulerConfig
from deployment.device_fit import fit_devices
from deployment.errors import SettingsError
from deployment.limits import SchedulerLimits
from model.config import CheckpointConfig
from model.tiny import tiny_config
from placement.engine_plan import EnginePlan, ExpertLayout
from placement.plan import create_plan
from tests.unit.placement.builders import create_profile

RELEASED = CheckpointConfig.load(Path(__file__).parents[2] / "data" / "released_config.json")
TINY = CheckpointConfig.model_validate(tiny_config())
GIB = 2**30


def fit(
    free_bytes: list[int | None],
    shard: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    checkpoint: CheckpointConfig = RELEASED,
    plan: EnginePlan | None = None,
) -> tuple[SchedulerLimits, ShardConfig]:
    config = EngineConfig(
        shard=ShardConfig(**({"world_size": len(free_bytes)} | (shard or {}))),
        scheduler=SchedulerConfig(**(scheduler or {})),
    )
    limits = SchedulerLimits.resolve(config.scheduler, checkpoint.text_config)
    return fit_devices(config, checkpoint, limits, plan, free_bytes)


def test_on_cpus_nothing_changes() -> None:
    limits, shard = fit([None, None], checkpoint=TINY)
    assert limits == SchedulerLimits.resolve(SchedulerConfig(), TINY.text_config)
    assert shard == ShardConfig(world_size=2)


def test_gpus_that_hold_everything_get_it() -> None:
    limits, shard = fit([4 * GIB] * 2, checkpoint=TINY)
    assert limits == SchedulerLimits.resolve(SchedulerConfig(), TINY.text_config)
    assert shard.max_resident_pages == (12 * 8 + 3 * 4) // 2


def test_gpus_of_32_gb_get_some_contexts_and_the_pages_that_fit() -> None:
    limits, shard = fit([30 * GIB] * 8)
    assert 2**20 // 32 < limits.num_blocks < 16 * 2**20 // 32
    assert shard.max_resident_pages is not None
    assert 1000 < shard.max_resident_pages < 1968


def test_the_gpu_with_the_least_memory_decides_for_all() -> None:
    assert fit([30 * GIB] * 7 + [27 * GIB]) == fit([27 * GIB] * 8)
    assert fit([30 * GIB] * 7 + [27 * GIB]) != fit([30 * GIB] * 8)


def test_what_is_set_stays() -> None:
    limits, shard = fit([30 * GIB] * 8, shard={"max_resident_pages": 500})
    assert shard.max_resident_pages == 500
    assert limits.num_blocks > 4 * 2**20 // 32
    fewer, shard = fit([30 * GIB] * 8, scheduler={"num_blocks": 40_000})
    assert fewer.num_blocks == 40_000
    assert shard.max_resident_pages is not None


def test_slots_that_are_not_made_leave_room_for_pages() -> None:
    pages = {
        staging: fit([30 * GIB] * 8, shard={"staging": staging, "ep_size": 1})[1].max_resident_pages or 0
        for staging in ("auto", "staged", "direct")
    }
    assert pages["auto"] < pages["staged"] < pages["direct"]


def test_a_plan_says_how_many_pages_are_hot() -> None:
    layout = ExpertLayout.of(RELEASED.text_config, 8, 8)
    profile = create_profile(*([1] * n for n in layout.experts_per_layer))
    budget_bytes = 1000 * layout.page_bytes
    plan = create_plan(profile, RELEASED.text_config, layout, arm="static", budget_bytes=budget_bytes)
    limits, shard = fit([30 * GIB] * 8, plan=plan)
    assert shard.max_resident_pages is None
    num_hot = plan.memory[0].num_hot_pages
    assert limits.num_blocks == fit([30 * GIB] * 8, shard={"max_resident_pages": num_hot})[0].num_blocks


def test_gpus_that_are_too_small_for_what_is_open_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"^6\.00 GiB of device memory are too little by"):
        fit([6 * GIB] * 8)


def test_what_is_set_is_tried_though_it_seems_too_much(caplog: pytest.LogCaptureFixture) -> None:
    everything = {"shard": {"max_resident_pages": 1968}, "scheduler": {"num_blocks": 40_000}}
    with caplog.at_level(logging.WARNING):
        limits, shard = fit([30 * GIB] * 8, **everything)
    assert (limits.num_blocks, shard.max_resident_pages) == (40_000, 1968)
    assert "30.00 GiB of GPU memory may be too little by" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        fit([130 * GIB] * 8, **everything)
    assert caplog.text == ""
