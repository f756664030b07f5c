"""Memory plan: what an engine takes of each GPU and of the host, what must be cold, and what helps if it does not fit.

    python -m placement.memory --config CHECKPOINT --world-size 8 --gpu-gib 32 --host-gib 503 [--ep-size 1]
        [--max-model-len N] [--max-num-seqs N] [--max-num-batched-tokens N] [--num-blocks N] [--num-staging-slots N]
        [--max-resident-pages N] [--max-host-pages N] [--cache-format packed] [--json]

Exit status: 0 if it fits, 3 if it does not, 1 or 2 if the arguments are wrong. Source: `spec/model.md` sections 10 and
11; design section 6.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from model.config import CheckpointConfig, ConfigError
from model.kv_layout import CacheFormat
from model.parallel import ParallelLayout
from placement.components import (
    DRAFT_EXPERTS,
    ENGRAM_TABLES,
    ROUTED_EXPERTS,
    VISION,
    Component,
    components,
    engram_table_bytes,
)
from placement.device_memory import (
    CUDA_CONTEXT,
    DRIVER,
    DeviceNeeds,
    MemoryPlanError,
    MemorySettings,
    Term,
    gib,
    resolve_settings,
)
from placement.plan import MIN_STAGING_SLOTS

VERSION: Final = 1
DOES_NOT_FIT: Final = 3
"""Exit status."""
MAX_WORLD_SIZE: Final = 8
"""Of `shard.world_size`."""
PLACES: Final = {
    ROUTED_EXPERTS: "pages, see below",
    DRAFT_EXPERTS: "pages, see below",
    ENGRAM_TABLES: "on the host, see below",
    VISION: "nothing: not served",
}
"""Where components are that are not on every device, for people."""
NOT_YET: Final = {"cache_format": "not a setting of the engine yet"}
"""Settings of the plan alone."""
_GIB: Final = 2**30
_BLOCK: Final = 4096
"""Header of a pool region, and what its checksums are padded to (`actors.host_pool`)."""
_CHECKSUM_BYTES: Final = 8
_SHARD_PROCESS_BYTES: Final = 2 * _GIB
_RAY_BYTES: Final = 3 * _GIB // 2
_SYSTEM_BYTES: Final = 4 * _GIB

_Change = dict[str, int | float | str]
"""Settings and their new values."""


class CachePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV caches in one format, with all other settings as they are."""

    cache_format: CacheFormat
    token_bytes: float
    """Of a token in KV blocks."""
    sequence_bytes: int
    """Of a sequence besides: window rings and half-group state."""
    blocks_bytes: int
    """Of the plan's KV blocks."""
    slots_bytes: int
    """Of `max_num_seqs` sequences besides."""
    num_hot_pages: int
    """With the plan's number of blocks; 0 if even that does not fit."""


class DevicePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory of a GPU; all ranks have the same."""

    gpu_bytes: int
    terms: tuple[Term, ...]
    """Everything, KV blocks and hot pages last."""
    used_bytes: int
    free_bytes: int
    missing_bytes: int
    num_blocks: int
    block_bytes: int
    num_kv_tokens: int
    """In all blocks but the null block."""
    all_contexts_bytes: int
    """Of KV blocks for `max_num_seqs` sequences of `max_model_len` tokens."""
    page_bytes: int
    num_pages: int
    num_hot_pages: int
    num_cold_pages: int
    cold_bytes: int
    cold_share: float
    """Of the rank's pages."""
    caches: tuple[CachePlan, ...]
    """In each format."""


class RankHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the host holds for one rank."""

    rank: int
    num_pool_pages: int
    pool_bytes: int
    """Its region of the pool, with header and checksums."""
    engram_bytes: int
    """Table rows of its look-up columns."""
    num_disk_pages: int
    """Neither in the pool nor hot: read from the checkpoint whenever they are needed."""


class HostPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory of the host."""

    host_bytes: int
    ranks: tuple[RankHost, ...]
    terms: tuple[Term, ...]
    used_bytes: int
    free_bytes: int
    missing_bytes: int


class Advice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A setting that frees memory where some is missing."""

    where: Literal["device", "host"]
    setting: str
    value: int | float | str
    freed_bytes: int
    """On each GPU, or on the host."""
    is_enough: bool
    """By itself."""
    note: str


class MemoryPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine takes of a machine."""

    version: Literal[1]
    settings: MemorySettings
    components: tuple[Component, ...]
    checkpoint_bytes: int
    device: DevicePlan
    host: HostPlan
    fits: bool
    advice: tuple[Advice, ...]
    """Empty if it fits."""


def create_memory_plan(
    config: CheckpointConfig, settings: MemorySettings, gpu_bytes: int, host_bytes: int
) -> MemoryPlan:
    """Plan an engine.

    Args:
        config: the whole `config.json`.
        settings: of the engine.
        gpu_bytes: memory that each GPU is sold with.
        host_bytes: memory of the host.
    """
    weights = components(config, settings.world_size)
    device = _plan_device(config, weights, settings, gpu_bytes)
    host = _plan_host(config, settings, device, host_bytes)
    advice: list[Advice] = []
    if device.missing_bytes:
        advice += _device_advice(config, weights, settings, device)
    if host.missing_bytes:
        advice += _host_advice(settings, device, host)
    return MemoryPlan(
        version=VERSION,
        settings=settings,
        components=weights,
        checkpoint_bytes=sum(component.num_bytes for component in weights),
        device=device,
        host=host,
        fits=not (device.missing_bytes or host.missing_bytes),
        advice=tuple(advice),
    )


def available_on(gpu_bytes: int) -> int:
    """What a rank can take of a GPU that is sold with `gpu_bytes`, once its process has a CUDA context."""
    return max(0, gpu_bytes - DRIVER.num_bytes - CUDA_CONTEXT.num_bytes)


def _plan_device(
    config: CheckpointConfig, weights: Sequence[Component], settings: MemorySettings, gpu_bytes: int
) -> DevicePlan:
    needs = DeviceNeeds.of(config.text_config, weights, settings)
    division = needs.divide(available_on(gpu_bytes))
    num_hot, num_blocks = division.num_resident_pages, division.num_blocks
    num_tokens = (num_blocks - 1) * settings.block_size
    terms = (
        DRIVER,
        CUDA_CONTEXT,
        *needs.terms,
        Term(
            "caches",
            "KV blocks",
            num_blocks * needs.block_bytes,
            "exact",
            f"{num_blocks} blocks, {num_tokens} tokens, {settings.cache_format}",
        ),
        Term(
            "pages",
            "hot expert pages",
            num_hot * needs.page_bytes,
            "exact",
            f"{num_hot} of {needs.num_pages}",
        ),
    )
    used = sum(term.num_bytes for term in terms)
    num_cold = needs.num_pages - num_hot
    return DevicePlan(
        gpu_bytes=gpu_bytes,
        terms=terms,
        used_bytes=used,
        free_bytes=max(0, gpu_bytes - used),
        missing_bytes=max(0, used - gpu_bytes),
        num_blocks=num_blocks,
        block_bytes=needs.block_bytes,
        num_kv_tokens=num_tokens,
        all_contexts_bytes=(1 + settings.max_num_seqs * settings.blocks_of_context) * needs.block_bytes,
        page_bytes=needs.page_bytes,
        num_pages=needs.num_pages,
        num_hot_pages=num_hot,
        num_cold_pages=num_cold,
        cold_bytes=num_cold * needs.page_bytes,
        cold_share=num_cold / needs.num_pages,
        caches=tuple(
            _plan_caches(config, weights, settings, name, num_blocks, available_on(gpu_bytes))
            for name in get_args(CacheFormat)
        ),
    )


def _plan_caches(
    config: CheckpointConfig,
    weights: Sequence[Component],
    settings: MemorySettings,
    cache_format: CacheFormat,
    num_blocks: int,
    device_bytes: int,
) -> CachePlan:
    settings = msgspec.structs.replace(settings, cache_format=cache_format, num_blocks=num_blocks)
    needs = DeviceNeeds.of(config.text_config, weights, settings)
    slots_bytes = sum(term.num_bytes for term in needs.terms if term.group == "caches")
    division = needs.divide(device_bytes)
    return CachePlan(
        cache_format=cache_format,
        token_bytes=needs.block_bytes / settings.block_size,
        sequence_bytes=slots_bytes // settings.max_num_seqs,
        blocks_bytes=num_blocks * needs.block_bytes,
        slots_bytes=slots_bytes,
        num_hot_pages=0 if division.missing_bytes else division.num_resident_pages,
    )


def region_bytes(num_pages: int, page_bytes: int) -> int:
    """Size of a region of the host pool that holds `num_pages` pages (`actors.host_pool`)."""
    return _BLOCK + -(-_CHECKSUM_BYTES * num_pages // _BLOCK) * _BLOCK + num_pages * page_bytes


def _plan_host(
    config: CheckpointConfig, settings: MemorySettings, device: DevicePlan, host_bytes: int
) -> HostPlan:
    num_pool_pages = device.num_pages
    if settings.max_host_pages is not None:
        num_pool_pages = min(num_pool_pages, settings.max_host_pages)
    ranks = tuple(
        RankHost(
            rank=rank,
            num_pool_pages=num_pool_pages,
            pool_bytes=region_bytes(num_pool_pages, device.page_bytes),
            engram_bytes=engram_table_bytes(
                config.text_config, ParallelLayout(rank, settings.world_size, settings.ep_size)
            ),
            num_disk_pages=max(0, device.num_cold_pages - num_pool_pages),
        )
        for rank in range(settings.world_size)
    )
    terms = (
        Term(
            "host",
            "expert pool",
            sum(rank.pool_bytes for rank in ranks),
            "exact",
            f"{len(ranks)} regions of {num_pool_pages} of {device.num_pages} pages, registered with CUDA",
        ),
        Term(
            "host",
            "Engram tables",
            sum(rank.engram_bytes for rank in ranks),
            "exact",
            "each rank the rows of its look-up columns",
        ),
        Term(
            "host",
            "shard processes",
            len(ranks) * _SHARD_PROCESS_BYTES,
            "assumption",
            "0.2 GiB each measured on a CPU; the rest for CUDA's libraries, not measured",
        ),
        Term(
            "host",
            "Ray and Serve",
            _RAY_BYTES,
            "assumption",
            "measured: 0.5 GiB for a small cluster, 0.9 GiB for its dashboard",
        ),
        Term(
            "host",
            "operating system",
            _SYSTEM_BYTES,
            "assumption",
            "with what it caches of files while they load",
        ),
    )
    used = sum(term.num_bytes for term in terms)
    return HostPlan(
        host_bytes=host_bytes,
        ranks=ranks,
        terms=terms,
        used_bytes=used,
        free_bytes=max(0, host_bytes - used),
        missing_bytes=max(0, used - host_bytes),
    )


def _device_advice(
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
            if setting not in (*NOT_YET, "world_size"):
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
    if settings.cache_format == "bf16":
        yield "cache_format", [{"cache_format": "packed"}], NOT_YET["cache_format"]
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


def _host_advice(settings: MemorySettings, device: DevicePlan, host: HostPlan) -> Iterator[Advice]:
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


def describe(plan: MemoryPlan) -> Iterator[str]:
    """The plan as a table, line by line."""
    settings, device, host = plan.settings, plan.device, plan.host
    yield f"checkpoint: {plan.checkpoint_bytes} bytes = {gib(plan.checkpoint_bytes)}"
    yield f"  {'':<28}{'':>8}{'bytes':>18}{'each rank keeps, in bytes':>32}"
    yield f"  {'component':<28}{'tensors':>8}{'in the files':>18}{'sharded':>16}{'replicated':>16}"
    for component in plan.components:
        kept = PLACES.get(component.name) or f"{component.sharded_bytes:>16}{component.replicated_bytes:>16}"
        yield f"  {component.name:<28}{component.num_tensors:>8}{component.num_bytes:>18}{kept:>32}"
    yield ""
    yield (
        f"each of {settings.world_size} GPUs, {gib(device.gpu_bytes)}: ep_size {settings.ep_size}, max_model_len "
        f"{settings.max_model_len}, max_num_seqs {settings.max_num_seqs}, max_num_batched_tokens "
        f"{settings.max_num_batched_tokens}"
    )
    yield from _describe_terms(device.terms)
    yield from _describe_rest(device.used_bytes, device.free_bytes, device.missing_bytes)
    yield (
        f"  hot: {device.num_hot_pages} of {device.num_pages} pages of {device.page_bytes} bytes; cold: "
        f"{device.num_cold_pages} pages, {gib(device.cold_bytes)} a rank, {device.cold_share:.1%}"
    )
    yield (
        f"  KV: {device.num_kv_tokens} tokens in all; {settings.max_num_seqs} sequences of "
        f"{settings.max_model_len} would take {gib(device.all_contexts_bytes)}"
    )
    for caches in device.caches:
        yield (
            f"  KV in {caches.cache_format}: {caches.token_bytes:g} bytes a token and {caches.sequence_bytes} a "
            f"sequence, {gib(caches.blocks_bytes + caches.slots_bytes)} here, which leaves {caches.num_hot_pages} "
            "hot pages"
        )
    yield ""
    yield f"the host, {gib(host.host_bytes)}"
    yield from _describe_terms(host.terms)
    yield from _describe_rest(host.used_bytes, host.free_bytes, host.missing_bytes)
    for rank in host.ranks:
        disk = f", {rank.num_disk_pages} pages on disk only" if rank.num_disk_pages else ""
        yield f"  rank {rank.rank}: pool {gib(rank.pool_bytes)}, Engram {gib(rank.engram_bytes)}{disk}"
    yield ""
    yield from _describe_outcome(plan)


def _describe_terms(terms: Iterable[Term]) -> Iterator[str]:
    for term in _with_summed_weights(terms):
        yield f"  {term.group:<10} {term.name:<26}{term.num_bytes / _GIB:>10.3f} GiB  {term.basis:<11} {term.note}"


def _with_summed_weights(terms: Iterable[Term]) -> list[Term]:
    """The terms with one for all sharded weights and one for all replicated ones; the components are listed above."""
    summed: dict[tuple[str, str], Term] = {}
    for term in terms:
        if term.group == "weights":
            before = summed.get(("weights", term.note))
            num_bytes = term.num_bytes + (before.num_bytes if before else 0)
            summed["weights", term.note] = Term(
                "weights", term.note, num_bytes, term.basis, "components above"
            )
        else:
            summed[term.group, term.name] = term
    return list(summed.values())


def _describe_rest(used: int, free: int, missing: int) -> Iterator[str]:
    rest = f"MISSING {gib(missing)}" if missing else f"free {gib(free)}"
    yield f"  {'used':<37}{used / _GIB:>10.3f} GiB  {rest}"


def _describe_outcome(plan: MemoryPlan) -> Iterator[str]:
    if plan.fits:
        yield "it fits"
        return
    for where, missing in (("each GPU", plan.device.missing_bytes), ("the host", plan.host.missing_bytes)):
        if missing:
            yield f"it does not fit: {where} lacks {gib(missing)}"
    for advice in plan.advice:
        enough = "enough" if advice.is_enough else "not enough by itself"
        yield (
            f"  {advice.setting} = {advice.value} frees {gib(advice.freed_bytes)} ({advice.where}), {enough}: "
            f"{advice.note}"
        )
    if not plan.advice:
        yield "  no setting helps"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--config", type=Path, required=True, help="the checkpoint's folder or its config.json"
    )
    parser.add_argument("--gpu-gib", type=float, required=True, help="memory that each GPU is sold with")
    parser.add_argument("--host-gib", type=float, required=True, help="memory of the host")
    parser.add_argument("--world-size", type=int, required=True, help="ranks, as shard.world_size")
    parser.add_argument("--ep-size", type=int, help="as shard.ep_size; by default the world size")
    for option, help_text in (
        ("--max-model-len", "as scheduler.max_model_len; by default all positions of the checkpoint"),
        ("--max-num-seqs", "as scheduler.max_num_seqs"),
        ("--max-num-batched-tokens", "as scheduler.max_num_batched_tokens"),
        ("--block-size", "as scheduler.block_size"),
        ("--num-blocks", "as scheduler.num_blocks; by default what fits"),
        ("--num-staging-slots", "as shard.num_staging_slots"),
        ("--max-resident-pages", "as shard.max_resident_pages; by default what fits"),
        ("--max-host-pages", "as expert_cache.max_host_pages; by default all"),
    ):
        parser.add_argument(option, type=int, default=argparse.SUPPRESS, help=help_text)
    parser.add_argument("--prefetch-mib", type=float, default=argparse.SUPPRESS, help="as shard.prefetch_mib")
    parser.add_argument(
        "--cache-format", choices=get_args(CacheFormat), default=argparse.SUPPRESS, help="of the KV caches"
    )
    parser.add_argument("--json", action="store_true", help="write the plan as JSON")
    options = vars(parser.parse_args(arguments))
    path, as_json = options.pop("config"), options.pop("json")
    try:
        gpu_bytes, host_bytes = (_bytes_of(name, options.pop(name)) for name in ("gpu_gib", "host_gib"))
        config = CheckpointConfig.load(path / "config.json" if path.is_dir() else path)
        settings = resolve_settings(config.text_config, **options)
        plan = create_memory_plan(config, settings, gpu_bytes, host_bytes)
    except (ConfigError, MemoryPlanError) as error:
        sys.exit(f"placement.memory: {error}")
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in describe(plan))
    if not plan.fits:
        sys.exit(DOES_NOT_FIT)


def _bytes_of(option: str, gib_count: float) -> int:
    if not (math.isfinite(gib_count) and gib_count > 0):
        raise MemoryPlanError(f"--{option.replace('_', '-')} must be a number above 0, got {gib_count}")
    return int(gib_count * _GIB)


if __name__ == "__main__":
    main()
