"""What helps an engine that does not fit, and how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from model.config import CheckpointConfig
from placement.components import (
    Component,
    components,
)
from placement.device_memory import (
    DeviceNeeds,
    MemoryPlanError,
    MemorySettings,
    gib,
    resolve_settings,
)
from placement.memory_plan import Advice, DevicePlan, HostPlan, region_bytes
from placement.plan import MIN_STAGING_SLOTS

MAX_WORLD_SIZE: Final = 8
"""Of `shard.world_size`."""

_Change = dict[str, int | float | str]
"""Settings and their new values."""


def device_advice(
    config: CheckpointConfig, weights: Sequence[Component], settings: MemorySettings, device: DevicePlan
) -> Iterator[Advice]:
    """What each setting frees, at the value nearest to the present one that is enough, or else at the farthest."""
    before = DeviceNeeds.of(config.text_config, weights, settings).least_bytes
    together: _Change = {}
    is_enough = False
    for setting, changes, note in _device_choices(config, settings, device):
        advice = None
        for change in changes:
            changed = msgspec.structs.replace(settings, **change)
            is_same_world = changed.world_size == settings.world_size
            kept = weights if is_same_world else components(config, changed.world_size)
            freed = before - DeviceNeeds.of(config.text_config, kept, changed).least_bytes
            advice = Advice("device", setting, change[setting], freed, freed >= device.missing_bytes, note)
            if advice.is_enough:
                break
        if advice is not None and advice.freed_bytes > 0:
            yield advice
            is_enough |= advice.is_enough
            if setting != "world_size":
                together[setting] = advice.value
    if together and not is_enough:
        changed = msgspec.structs.replace(settings, **together)
        freed = before - DeviceNeeds.of(config.text_config, weights, changed).least_bytes
        yield Advice(
            "device", ", ".join(together), "as above", freed, freed >= device.missing_bytes, "together"
        )


def _device_choices(
    config: CheckpointConfig, settings: MemorySettings, device: DevicePlan
) -> Iterator[tuple[str, list[_Change], str]]:
    """Settings, what to change them to, nearest first, and what comes with it."""
    if settings.max_resident_pages is not None:
        too_many = -(-device.missing_bytes // device.page_bytes)
        yield (
            "max_resident_pages",
            [{"max_resident_pages": max(0, device.num_hot_pages - too_many)}],
            "more is cold",
        )
    if settings.num_blocks is not None:
        too_many = -(-device.missing_bytes // device.block_bytes)
        num_blocks = max(settings.min_blocks, settings.num_blocks - too_many)
        yield "num_blocks", [{"num_blocks": num_blocks}], "sequences are preempted earlier"
    for setting, least, note in (
        ("max_model_len", 2, "longer requests are refused"),
        ("max_num_batched_tokens", 1, "longer prompts take more steps"),
        ("max_num_seqs", 1, "more requests wait"),
        ("num_staging_slots", MIN_STAGING_SLOTS, "copies hide less"),
    ):
        yield setting, [{setting: value} for value in _halvings(getattr(settings, setting), least)], note
    if settings.prefetch_mib:
        yield "prefetch_mib", [{"prefetch_mib": 0.0}], "cold pages of a decode step are read when needed"
    world_size = 2 * settings.world_size
    ep_size = world_size if settings.ep_size == settings.world_size else settings.ep_size
    if _can_be_cut(config, world_size, ep_size):
        yield "world_size", [{"world_size": world_size, "ep_size": ep_size}], "more GPUs"


def _halvings(value: int, least: int) -> list[int]:
    """Ever smaller values down to `least`."""
    values = []
    while value > least:
        value = max(least, value // 2)
        values.append(value)
    return values


def _can_be_cut(config: CheckpointConfig, world_size: int, ep_size: int) -> bool:
    try:
        resolve_settings(config.text_config, world_size=world_size, ep_size=ep_size)
    except MemoryPlanError:
        return False
    return world_size <= MAX_WORLD_SIZE


def host_advice(settings: MemorySettings, device: DevicePlan, host: HostPlan) -> Iterator[Advice]:
    """The pool is all that can be smaller: its pages are in the checkpoint's files, too."""
    num_ranks, num_now = len(host.ranks), host.ranks[0].num_pool_pages
    pool_now = region_bytes(num_now, device.page_bytes)
    num_pages = max(0, num_now - -(-host.missing_bytes // (num_ranks * device.page_bytes)))
    while (
        num_pages and num_ranks * (pool_now - region_bytes(num_pages, device.page_bytes)) < host.missing_bytes
    ):
        num_pages -= 1
    freed = num_ranks * (pool_now - region_bytes(num_pages, device.page_bytes))
    if freed == 0:
        return
    num_disk = max(0, device.num_cold_pages - num_pages)
    note = (
        f"about {num_disk} cold pages of each rank, {gib(num_disk * device.page_bytes)}, are then read from the "
        "checkpoint whenever they are needed"
        if num_disk
        else "only hot pages leave the pool"
    )
    yield Advice("host", "max_host_pages", num_pages, freed, freed >= host.missing_bytes, note)
