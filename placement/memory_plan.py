"""What an engine takes of each GPU and of the host, term by term. Source: `spec/model.md` sections 10 and 11."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from model.config import CheckpointConfig
from model.parallel import ParallelLayout
from placement.components import (
    Component,
    engram_table_bytes,
)
from placement.device_memory import (
    CUDA_CONTEXT,
    DRIVER,
    DeviceNeeds,
    MemorySettings,
    Term,
)

VERSION: Final = 1
_GIB: Final = 2**30
_BLOCK: Final = 4096
"""Header of a pool region, and what its checksums are padded to (`actors.host_pool`)."""
_CHECKSUM_BYTES: Final = 8
_SHARD_PROCESS_BYTES: Final = 2 * _GIB
_RAY_BYTES: Final = 3 * _GIB // 2
_SYSTEM_BYTES: Final = 4 * _GIB


class CachePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV caches."""

    token_bytes: float
    """Of a token in KV blocks."""
    sequence_bytes: int
    """Of a sequence besides: window rings and half-group state."""
    blocks_bytes: int
    """Of the plan's KV blocks."""
    slots_bytes: int
    """Of `max_num_seqs` sequences besides."""


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
    caches: CachePlan


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


def available_on(gpu_bytes: int) -> int:
    """What a rank can take of a GPU that is sold with `gpu_bytes`, once its process has a CUDA context."""
    return max(0, gpu_bytes - DRIVER.num_bytes - CUDA_CONTEXT.num_bytes)


def plan_device(
    config: CheckpointConfig, weights: Sequence[Component], settings: MemorySettings, gpu_bytes: int
) -> DevicePlan:
    """What each GPU holds: `gpu_bytes` is what it is sold with."""
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
            f"{num_blocks} blocks, {num_tokens} tokens",
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
        caches=_plan_caches(needs, num_blocks),
    )


def _plan_caches(needs: DeviceNeeds, num_blocks: int) -> CachePlan:
    settings = needs.settings
    slots_bytes = sum(term.num_bytes for term in needs.terms if term.group == "caches")
    return CachePlan(
        token_bytes=needs.block_bytes / settings.block_size,
        sequence_bytes=slots_bytes // settings.max_num_seqs,
        blocks_bytes=num_blocks * needs.block_bytes,
        slots_bytes=slots_bytes,
    )


def region_bytes(num_pages: int, page_bytes: int) -> int:
    """Size of a region of the host pool that holds `num_pages` pages (`actors.host_pool`)."""
    return _BLOCK + -(-_CHECKSUM_BYTES * num_pages // _BLOCK) * _BLOCK + num_pages * page_bytes


def plan_host(
    config: CheckpointConfig, settings: MemorySettings, device: DevicePlan, host_bytes: int
) -> HostPlan:
    """What the host holds for an engine whose GPUs hold what `device` says."""
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
