from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.config import ShardConfig
from actors.host_pool import pool_contents
from actors.host_pool import region_bytes as pool_region_bytes
from deployment.config import SchedulerConfig
from deployment.errors import SettingsError
from deployment.limits import SchedulerLimits
from kernels.reference.attention import attention_row_bytes as reference_attention_row_bytes
from kernels.reference.indexer import index_row_bytes as reference_index_row_bytes
from model.config import CheckpointConfig
from model.kv_cache import CacheGeometry, KvCaches
from model.parallel import ParallelLayout
from model.sampler import TILE_ROWS
from model.tiny import tiny_config, write_tiny_checkpoint
from placement.components import Component, components
from placement.device_memory import (
    KV_SHARE,
    SAMPLED_ROWS,
    DeviceNeeds,
    MemoryPlanError,
    MemorySettings,
    attention_row_bytes,
    fit_device,
    index_row_bytes,
    resolve_settings,
)
from placement.memory import DOES_NOT_FIT, create_memory_plan, main
from placement.memory_plan import MemoryPlan, available_on, region_bytes
from placement.plan import MIN_STAGING_SLOTS

CONFIG_FILE = Path(__file__).parents[2] / "data" / "released_config.json"
RELEASED = CheckpointConfig.load(CONFIG_FILE)
MODEL = RELEASED.text_config
TINY = CheckpointConfig.model_validate(tiny_config())
WEIGHTS = components(RELEASED, 8)
DERIVED: dict[tuple[str, int], tuple[Component, ...]] = {}
GIB = 2**30


@pytest.fixture(autouse=True)
def _derive_components_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half a second."""

    def cached(config: CheckpointConfig, world_size: int) -> tuple[Component, ...]:
        key = config.model_dump_json(), world_size
        if key not in DERIVED:
            DERIVED[key] = components(config, world_size)
        return DERIVED[key]

    monkeypatch.setattr("placement.memory.components", cached)
    monkeypatch.setattr("placement.memory_advice.components", cached)


def create_settings(**changes: Any) -> MemorySettings:
    return resolve_settings(MODEL, **({"world_size": 8} | changes))


def create_needs(**changes: Any) -> DeviceNeeds:
    return DeviceNeeds.of(MODEL, WEIGHTS, create_settings(**changes))


def create_plan(gpu_gib: float = 32, host_gib: float = 503, **changes: Any) -> MemoryPlan:
    return create_memory_plan(RELEASED, create_settings(**changes), int(gpu_gib * GIB), int(host_gib * GIB))


def bytes_of(plan: MemoryPlan, name: str) -> int:
    return sum(term.num_bytes for term in (*plan.device.terms, *plan.host.terms) if term.name == name)


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_the_published_machine_holds_the_model_with_a_third_to_a_half_of_the_pages_cold(ep_size: int) -> None:
    plan = create_plan(ep_size=ep_size)
    assert plan.fits
    assert plan.advice == ()
    assert plan.checkpoint_bytes == 510_286_023_000
    assert 1 / 3 < plan.device.cold_share < 1 / 2
    for part, capacity in ((plan.device, 32 * GIB), (plan.host, 503 * GIB)):
        assert part.used_bytes == sum(term.num_bytes for term in part.terms)
        assert part.used_bytes + part.free_bytes == capacity
    assert plan.device.free_bytes < plan.device.page_bytes


def test_every_expert_byte_is_in_one_page_of_one_rank_and_every_table_byte_on_the_host() -> None:
    stored = {component.name: component.num_bytes for component in WEIGHTS}
    for ep_size in (1, 8):
        plan = create_plan(ep_size=ep_size)
        device = plan.device
        assert 8 * device.num_pages * device.page_bytes == (
            stored["routed experts"] + stored["DSpark routed experts"]
        )
        assert device.num_hot_pages + device.num_cold_pages == device.num_pages
        assert device.cold_bytes == device.num_cold_pages * device.page_bytes
        assert bytes_of(plan, "Engram tables") == stored["engram tables"]


@pytest.mark.parametrize("ep_size", [1, 8])
@pytest.mark.parametrize("max_host_pages", [None, 0, 511, 10**6])
def test_a_region_is_as_large_as_the_host_pool_makes_it(ep_size: int, max_host_pages: int | None) -> None:
    plan = create_plan(ep_size=ep_size, max_host_pages=max_host_pages)
    for rank in plan.host.ranks[::7]:
        layout = ParallelLayout(rank.rank, 8, ep_size)
        assert rank.pool_bytes == pool_region_bytes(pool_contents("m", MODEL, layout, max_host_pages))
        assert rank.pool_bytes == region_bytes(rank.num_pool_pages, plan.device.page_bytes)


def test_the_caches_are_those_that_a_shard_makes() -> None:
    plan = create_plan(max_model_len=5000, max_num_seqs=7, num_blocks=999)
    caches = KvCaches(MODEL, CacheGeometry(7, 999, 32), torch.float32, torch.device("meta"))
    assert caches.num_bytes == sum(term.num_bytes for term in plan.device.terms if term.group == "caches")


def test_the_caches_have_the_bytes_of_the_specification() -> None:
    caches = create_plan(max_num_seqs=16).device.caches
    assert caches.token_bytes == 890
    ring, halves = 134, 3 * 7 * 4096
    assert caches.sequence_bytes == ring * 528 * 43 + halves


def test_the_sampler_takes_as_many_rows_at_once_as_the_plan_says() -> None:
    assert SAMPLED_ROWS == TILE_ROWS


def test_tiles_of_rows_are_as_large_as_the_operators_make_them() -> None:
    for world_size in (1, 8):
        heads = MODEL.num_attention_heads // world_size
        keys = MODEL.sliding_window + MODEL.index_topk
        assert attention_row_bytes(MODEL, world_size) == reference_attention_row_bytes(
            heads, MODEL.head_dim, keys, torch.float32
        )
    assert index_row_bytes(MODEL, create_settings(max_model_len=70_000)) == reference_index_row_bytes(
        MODEL.index_n_heads, 70_000, torch.float32
    )


def test_unset_settings_are_those_of_the_engine() -> None:
    unset, scheduler, shard = create_settings(), SchedulerConfig(), ShardConfig()
    assert unset.max_num_seqs == scheduler.max_num_seqs
    assert unset.max_num_batched_tokens == scheduler.max_num_batched_tokens
    assert unset.block_size == scheduler.block_size
    assert unset.prefetch_mib == shard.prefetch_mib
    assert unset.max_model_len == SchedulerLimits.resolve(scheduler, MODEL).max_model_len


@pytest.mark.parametrize(("max_model_len", "block_size"), [(2, 2), (33, 32), (34, 32), (4096, 16)])
def test_one_context_takes_the_blocks_without_which_the_engine_does_not_start(
    max_model_len: int, block_size: int
) -> None:
    least = create_settings(max_model_len=max_model_len, block_size=block_size).min_blocks
    config = SchedulerConfig(max_model_len=max_model_len, block_size=block_size)
    assert SchedulerLimits.resolve(config.model_copy(update={"num_blocks": least}), MODEL).num_blocks == least
    if least > 2:
        with pytest.raises(SettingsError, match=f"needs {least} blocks"):
            SchedulerLimits.resolve(config.model_copy(update={"num_blocks": least - 1}), MODEL)


SETTINGS = st.fixed_dictionaries(
    {"max_model_len": st.integers(2, 2**20), "max_num_seqs": st.integers(1, 300)},
    optional={
        "max_resident_pages": st.integers(0, 3000),
        "ep_size": st.sampled_from([1, 2, 4, 8]),
        "max_num_batched_tokens": st.integers(1, 9000),
    },
)


@settings(deadline=None, max_examples=200)
@given(SETTINGS, st.integers(0, 200 * GIB))
def test_what_fits_is_used_and_what_is_missing_is_said(changes: dict[str, Any], device_bytes: int) -> None:
    needs = create_needs(**changes)
    division = needs.divide(device_bytes)
    used = (
        needs.fixed_bytes
        + division.num_blocks * needs.block_bytes
        + division.num_resident_pages * needs.page_bytes
    )
    assert used + division.free_bytes - division.missing_bytes == device_bytes
    assert division.missing_bytes == max(0, needs.least_bytes - device_bytes)
    assert division.num_blocks >= needs.settings.min_blocks
    assert division.num_blocks <= 1 + needs.settings.max_num_seqs * needs.settings.blocks_of_context
    if "max_resident_pages" in changes:
        assert division.num_resident_pages == min(changes["max_resident_pages"], needs.num_pages)
    elif division.num_resident_pages < needs.num_pages and not division.missing_bytes:
        assert division.free_bytes < needs.page_bytes
        is_one_context = division.num_blocks == needs.settings.min_blocks
        share = KV_SHARE * (device_bytes - needs.fixed_bytes)
        assert is_one_context or division.num_blocks * needs.block_bytes <= share


def test_blocks_get_what_pages_leave_when_one_of_them_is_set() -> None:
    needs = create_needs(max_model_len=4096, max_resident_pages=1000)
    division = needs.divide(30 * GIB)
    assert (division.num_blocks, division.num_resident_pages) == (1 + 16 * 128, 1000)
    needs = create_needs(max_model_len=4096, num_blocks=500)
    division = needs.divide(30 * GIB)
    assert division.num_blocks == 500
    assert division.free_bytes < needs.page_bytes


def test_a_device_that_holds_everything_gets_every_page_and_every_context() -> None:
    division = fit_device(RELEASED, create_settings(), 130 * GIB)
    assert (division.num_blocks, division.num_resident_pages) == (1 + 16 * 32768, 1968)


def test_a_device_that_is_too_small_is_refused_with_what_takes_how_much() -> None:
    with pytest.raises(
        MemoryPlanError,
        match=r"^5\.00 GiB of device memory are too little by [\d.]+ GiB: .*num_blocks = 32769 needs",
    ):
        fit_device(RELEASED, create_settings(), 5 * GIB)
    with pytest.raises(MemoryPlanError, match=r"max_resident_pages = 1968 needs 34\.46 GiB"):
        fit_device(RELEASED, create_settings(max_resident_pages=1968), 31 * GIB)


@pytest.mark.parametrize(
    ("gpu_gib", "changes"),
    [
        (5, {}),
        (6.5, {}),
        (9, {"max_num_batched_tokens": 8192, "max_model_len": 8192}),
        (12, {"max_num_seqs": 2000, "max_model_len": 8192}),
        (7, {"num_staging_slots": 300, "max_model_len": 8192}),
        (32, {"max_resident_pages": 1968}),
        (32, {"max_model_len": 8192, "num_blocks": 10**6}),
        (6, {"world_size": 4, "max_model_len": 8192}),
        (7, {"ep_size": 1, "prefetch_mib": 5000, "max_model_len": 8192}),
    ],
)
def test_a_setting_that_is_said_to_be_enough_makes_it_fit(gpu_gib: float, changes: dict[str, Any]) -> None:
    plan = create_plan(gpu_gib, **changes)
    assert not plan.fits
    assert plan.device.missing_bytes
    enough = [advice for advice in plan.advice if advice.is_enough]
    assert enough
    for advice in enough:
        change: dict[str, Any] = {advice.setting: advice.value}
        if advice.setting == "world_size":
            change["ep_size"] = advice.value
        if "," not in advice.setting:
            assert create_plan(gpu_gib, **(changes | change)).fits, advice
            assert advice.freed_bytes >= plan.device.missing_bytes


def test_what_is_not_enough_says_so_and_what_all_of_it_frees_together() -> None:
    plan = create_plan(3)
    *single, together = plan.advice
    assert not any(advice.is_enough for advice in plan.advice)
    assert together.setting == ", ".join(advice.setting for advice in single)
    assert max(advice.freed_bytes for advice in single) < together.freed_bytes
    assert together.freed_bytes < plan.device.missing_bytes


@pytest.mark.parametrize("host_gib", [210.5, 300, 400, 485])
def test_a_host_that_is_too_small_is_told_how_many_pages_its_pool_may_have(host_gib: float) -> None:
    plan = create_plan(host_gib=host_gib)
    assert plan.host.missing_bytes == bytes_of(plan, "expert pool") + sum(
        term.num_bytes for term in plan.host.terms[1:]
    ) - int(host_gib * GIB)
    (advice,) = plan.advice
    assert (advice.where, advice.setting, advice.is_enough) == ("host", "max_host_pages", True)
    assert isinstance(advice.value, int)
    smaller = create_plan(host_gib=host_gib, max_host_pages=advice.value)
    assert smaller.fits
    assert not create_plan(host_gib=host_gib, max_host_pages=advice.value + 1).fits
    num_disk = max(0, smaller.device.num_cold_pages - advice.value)
    assert smaller.host.ranks[0].num_disk_pages == num_disk
    assert ("are then read from the checkpoint" in advice.note) == (num_disk > 0)


def test_no_pool_is_small_enough_for_a_host_without_room_for_engram() -> None:
    (advice,) = create_plan(host_gib=180).advice
    assert (advice.value, advice.is_enough) == (0, False)


def command(*options: str) -> list[str]:
    return [
        "--config",
        str(CONFIG_FILE),
        "--world-size",
        "8",
        "--gpu-gib",
        "32",
        "--host-gib",
        "503",
        *options,
    ]


def test_json_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    main(command("--json", "--ep-size", "1", "--max-model-len", "65536"))
    written = capsys.readouterr().out
    plan = create_plan(ep_size=1, max_model_len=65536)
    assert msgspec.json.decode(written, type=MemoryPlan) == plan
    assert json.loads(written)["version"] == 1


def test_the_table_says_what_is_cold_and_that_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    main(command())
    plan, lines = create_plan(), capsys.readouterr().out.splitlines()
    assert lines[0] == "checkpoint: 510286023000 bytes = 475.24 GiB"
    assert lines[-1] == "it fits"
    device = plan.device
    assert any(f"cold: {device.num_cold_pages} pages" in line for line in lines)
    assert any("890 bytes a token" in line for line in lines)
    for term in (*device.terms, *plan.host.terms):
        assert term.group == "weights" or any(term.name in line for line in lines), term


def test_what_does_not_fit_ends_with_a_status_and_says_what_helps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command(), "--gpu-gib", "6.5", "--host-gib", "400"])
    assert end.value.code == DOES_NOT_FIT
    out = capsys.readouterr().out
    assert "it does not fit: each GPU lacks 1.54 GiB" in out
    assert "it does not fit: the host lacks 86.00 GiB" in out
    assert "max_model_len = 65536 frees 1.58 GiB (device), enough" in out
    assert "max_host_pages = " in out


def test_a_tiny_checkpoint_is_planned_from_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_checkpoint(tmp_path)
    main(["--config", str(tmp_path), "--world-size", "2", "--gpu-gib", "4", "--host-gib", "12", "--json"])
    plan = msgspec.json.decode(capsys.readouterr().out, type=MemoryPlan)
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    headers = stored - plan.checkpoint_bytes
    assert 0 < headers < stored / 10
    assert plan.device.num_hot_pages == plan.device.num_pages == (12 * 8 + 3 * 4) // 2
    assert plan.device.num_blocks == 1 + 16 * 8


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--gpu-gib nan", "--gpu-gib must be a number above 0, got nan"),
        ("--host-gib 0", "--host-gib must be a number above 0, got 0.0"),
        ("--world-size 0", r"world_size"),
        ("--world-size 3", "cannot be cut into 3 parts"),
        ("--ep-size 3", "ep_size 3 does not divide world_size 8"),
        ("--ep-size 0", "ep_size"),
        (
            "--max-model-len 2000000",
            "max_model_len is 2000000, but the checkpoint has max_position_embeddings",
        ),
        ("--max-model-len 0", "max_model_len"),
        ("--max-num-seqs 0", "max_num_seqs"),
        ("--block-size 3", "block_size"),
        ("--num-blocks 10", "num_blocks is 10, but one sequence .* needs 32769 blocks"),
        ("--num-staging-slots 1", "num_staging_slots"),
        ("--max-resident-pages -1", "max_resident_pages"),
        ("--max-host-pages -1", "max_host_pages"),
        ("--prefetch-mib nan", "prefetch_mib"),
        ("--config nowhere.json", r"nowhere\.json: cannot be read"),
    ],
)
def test_the_command_line_says_in_one_line_what_is_wrong(options: str, problem: str) -> None:
    with pytest.raises(SystemExit, match=rf"^placement\.memory: .*{problem}") as error:
        main([*command(), *options.split()])
    assert "\n" not in str(error.value)


def test_more_than_the_gpu_is_never_promised_to_a_process() -> None:
    assert available_on(0) == 0
    assert available_on(32 * GIB) < 31.4 * GIB
    assert create_settings().num_staging_slots >= MIN_STAGING_SLOTS
