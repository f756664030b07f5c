"""What a rank needs of its device's memory, and how many KV blocks and resident expert pages fit into the rest.

The weights and caches are exact. The workspace is what the operators of `model` and `kernels.reference` allocate at
the widest places of a step; those do not all occur at once, but the allocator of a device keeps what it once had for
each of them. What comes from outside this program is an assumption and says where it is from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec

from kernels.row_tiles import TILE_BYTES
from model.config import CheckpointConfig, ModelConfig
from model.kv_layout import CacheBytes, CacheShapes
from model.parallel import ParallelLayout
from placement.components import Component, components, largest_fp8_matrix
from placement.engine_plan import ExpertLayout
from placement.plan import MIN_STAGING_SLOTS, default_num_staging_slots

KV_SHARE: Final = 1 / 8
"""Share of the memory besides weights and workspace that KV blocks take at most, if nothing is set and one whole
context fits into it. A choice: at 8 x 32 GB each gibibyte of KV costs 3 % of the pages their residence."""
_PREFETCH_SETS: Final = 2
"""One layer reads its slots while those of the next are filled (`actors.page_prefetch`)."""
_MIB: Final = 2**20
_BF16, _FP32, _FP64, _INT64 = 2, 4, 8, 8
"""Bytes of an element."""
_HOST_PAGE_BYTES: Final = 4096
Basis = Literal["exact", "estimate", "assumption"]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_AtLeastTwo = Annotated[int, msgspec.Meta(ge=2)]


class MemoryPlanError(ValueError):
    """Settings that contradict each other or the model, or need more memory than there is."""


class Term(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that takes memory."""

    group: Literal["runtime", "weights", "caches", "staging", "workspace", "pages", "host"]
    name: str
    num_bytes: _Count
    basis: Basis
    note: str
    """How it comes about; of an assumption, where it is from."""


DRIVER: Final = Term(
    "runtime",
    "held back by the driver",
    640 * _MIB,
    "assumption",
    "of a GPU sold as 32 GB: eight offer 251 GiB together, 31.4 GiB each (published machine)",
)
CUDA_CONTEXT: Final = Term(
    "runtime", "CUDA context", 384 * _MIB, "assumption", "before anything is loaded; not measured"
)
LIBRARIES: Final = Term(
    "runtime", "libraries", 128 * _MIB, "assumption", "cuBLAS's workspace and the kernels' code; not measured"
)
NCCL: Final = Term("runtime", "NCCL buffers", 512 * _MIB, "assumption", "with several ranks; not measured")
CUDA_GRAPHS: Final = Term(
    "runtime", "CUDA graphs", 512 * _MIB, "assumption", "reserve: none are captured yet (design section 7)"
)
FRAGMENTATION: Final = Term(
    "runtime", "allocator's rounding", 256 * _MIB, "assumption", "gaps between blocks of different sizes"
)
SAMPLED_ROWS: Final = 8
"""`model.sampler.TILE_ROWS`."""
_SAMPLER_BYTES: Final = 8 * _FP64
"""For each token of a row: probabilities, sorted, filtered and summed, in float64 (`model.sampler`)."""
_MAPPED_PAGE_BYTES: Final = 8
"""Of a device's page table for each host page that is registered with it. An assumption: one entry."""


class MemorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of an engine that decide what it needs, named as in EngineConfig and resolved but for the Nones."""

    world_size: _Positive
    ep_size: _Positive
    max_model_len: _AtLeastTwo
    max_num_seqs: _Positive
    max_num_batched_tokens: _Positive
    block_size: Annotated[int, msgspec.Meta(ge=2, multiple_of=2)]
    num_blocks: _AtLeastTwo | None
    """None: what fits, see `DeviceNeeds.divide`."""
    num_staging_slots: _AtLeastTwo
    prefetch_mib: Annotated[float, msgspec.Meta(ge=0)]
    max_resident_pages: _Count | None
    """None: what fits."""
    max_host_pages: _Count | None
    """None: every page."""

    @property
    def blocks_of_context(self) -> int:
        """KV blocks of one sequence of `max_model_len` tokens, of which the newest needs none."""
        return -(-(self.max_model_len - 1) // self.block_size)

    @property
    def min_blocks(self) -> int:
        """KV blocks without which the engine does not start: one whole context and the null block."""
        return 1 + self.blocks_of_context


def resolve_settings(
    model: ModelConfig,
    *,
    world_size: int,
    ep_size: int | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    block_size: int = 32,
    num_blocks: int | None = None,
    num_staging_slots: int | None = None,
    prefetch_mib: float = 8.0,
    max_resident_pages: int | None = None,
    max_host_pages: int | None = None,
) -> MemorySettings:
    """The settings with what the model decides filled in; defaults are those of `EngineConfig`.

    Raises: MemoryPlanError if a number is out of range, the model cannot be cut over the ranks or lacks the positions.
    """
    given = {
        "world_size": world_size,
        "ep_size": world_size if ep_size is None else ep_size,
        "max_model_len": model.max_position_embeddings if max_model_len is None else max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "num_staging_slots": MIN_STAGING_SLOTS if num_staging_slots is None else num_staging_slots,
        "prefetch_mib": prefetch_mib,
        "max_resident_pages": max_resident_pages,
        "max_host_pages": max_host_pages,
    }
    try:
        settings = msgspec.convert(given, MemorySettings)
        ParallelLayout(0, settings.world_size, settings.ep_size).check(model)
        layout = ExpertLayout.of(model, settings.world_size, settings.ep_size)
    except ValueError as error:
        raise MemoryPlanError(str(error)) from error
    if settings.max_model_len > model.max_position_embeddings:
        raise MemoryPlanError(
            f"max_model_len is {max_model_len}, but the checkpoint has max_position_embeddings = "
            f"{model.max_position_embeddings}"
        )
    if settings.num_blocks is not None and settings.num_blocks < settings.min_blocks:
        raise MemoryPlanError(
            f"num_blocks is {num_blocks}, but one sequence of max_model_len = {settings.max_model_len} tokens needs "
            f"{settings.min_blocks} blocks of {settings.block_size} tokens, the null block included"
        )
    if num_staging_slots is None:
        num_slots = default_num_staging_slots(layout.page_bytes, layout.largest_layer)
        settings = msgspec.structs.replace(settings, num_staging_slots=num_slots)
    return settings


class Division(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a device's memory is divided."""

    num_blocks: _Count
    """KV blocks, the null block included."""
    num_resident_pages: _Count
    """Hot pages."""
    free_bytes: _Count
    missing_bytes: _Count
    """By how much it does not fit. Then the numbers are what was set, or the least."""


class DeviceNeeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every rank needs on its device, once its process has a CUDA context."""

    settings: MemorySettings
    terms: tuple[Term, ...]
    """Everything but KV blocks and resident pages."""
    block_bytes: _Positive
    """Of a KV block."""
    page_bytes: _Positive
    """Of an expert page."""
    num_pages: _Count
    """Of a rank."""

    @classmethod
    def of(cls, model: ModelConfig, weights: Iterable[Component], settings: MemorySettings) -> DeviceNeeds:
        """What the settings of an engine lead to.

        Args:
            model: dimensions.
            weights: its components for `settings.world_size` ranks.
            settings: of the engine.
        """
        layout = ExpertLayout.of(model, settings.world_size, settings.ep_size)
        block = CacheShapes.of(model, 0, 1, settings.block_size)
        return cls(
            settings=settings,
            terms=(
                *_runtime_terms(layout, settings),
                *_weight_terms(weights),
                *_slot_terms(model, settings),
                *_staging_terms(layout, settings),
                *_workspace_terms(model, settings),
            ),
            block_bytes=CacheBytes.of(block).total,
            page_bytes=layout.page_bytes,
            num_pages=layout.num_rank_pages,
        )

    @property
    def fixed_bytes(self) -> int:
        """Of `terms`."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def least_bytes(self) -> int:
        """With no more blocks and pages than the settings ask for, or one whole context and no page."""
        num_blocks = self.settings.num_blocks or self.settings.min_blocks
        num_pages = min(self.num_pages, self.settings.max_resident_pages or 0)
        return self.fixed_bytes + num_blocks * self.block_bytes + num_pages * self.page_bytes

    def divide(self, device_bytes: int) -> Division:
        """KV blocks and resident pages, as many as fit where the settings leave them open.

        A resident page saves its bytes whenever it is chosen; KV beyond a context saves prompts from being computed
        again when sequences would not fit otherwise. So KV gets what `max_num_seqs` whole contexts take, but no more
        than the larger of KV_SHARE and what all pages leave over; and at least one whole context, without which the
        engine does not start. Pages get the rest. If `max_resident_pages` is set, KV gets what that leaves.

        Args:
            device_bytes: what a rank can take on its device.
        """
        settings = self.settings
        left = device_bytes - self.fixed_bytes
        max_pages = self.num_pages
        if settings.max_resident_pages is not None:
            max_pages = min(max_pages, settings.max_resident_pages)
        if settings.num_blocks is not None:
            num_blocks = settings.num_blocks
        else:
            for_blocks = left - max_pages * self.page_bytes
            if settings.max_resident_pages is None:
                for_blocks = max(for_blocks, int(left * KV_SHARE))
            all_blocks = 1 + settings.max_num_seqs * settings.blocks_of_context
            num_blocks = max(settings.min_blocks, min(all_blocks, for_blocks // self.block_bytes))
        left -= num_blocks * self.block_bytes
        num_pages = max_pages
        if settings.max_resident_pages is None:
            num_pages = min(max_pages, max(0, left) // self.page_bytes)
        left -= num_pages * self.page_bytes
        return Division(num_blocks, num_pages, free_bytes=max(0, left), missing_bytes=max(0, -left))


def fit_device(config: CheckpointConfig, settings: MemorySettings, device_bytes: int) -> Division:
    """`DeviceNeeds.divide` for an engine that is about to start.

    Raises: MemoryPlanError that says by how much the device is too small, and what takes how much.
    """
    needs = DeviceNeeds.of(config.text_config, components(config, settings.world_size), settings)
    division = needs.divide(device_bytes)
    if division.missing_bytes:
        raise MemoryPlanError(
            f"{gib(device_bytes)} of device memory are too little by {gib(division.missing_bytes)}: weights, "
            f"workspace and the rest need {gib(needs.fixed_bytes)}, num_blocks = {division.num_blocks} needs "
            f"{gib(division.num_blocks * needs.block_bytes)}, max_resident_pages = {division.num_resident_pages} "
            f"needs {gib(division.num_resident_pages * needs.page_bytes)}; `python -m placement.memory` says which "
            "setting helps"
        )
    return division


def gib(num_bytes: float) -> str:
    """A size for people."""
    return f"{num_bytes / 2**30:.2f} GiB"


def _runtime_terms(layout: ExpertLayout, settings: MemorySettings) -> Iterable[Term]:
    yield LIBRARIES
    if settings.world_size > 1:
        yield NCCL
    num_pages = layout.num_rank_pages if settings.max_host_pages is None else settings.max_host_pages
    num_registered = min(num_pages, layout.num_rank_pages) * layout.page_bytes // _HOST_PAGE_BYTES
    yield Term(
        "runtime",
        "registered host pages",
        num_registered * _MAPPED_PAGE_BYTES,
        "assumption",
        f"{_MAPPED_PAGE_BYTES} bytes for each {_HOST_PAGE_BYTES} of the rank's pool region",
    )
    yield CUDA_GRAPHS
    yield FRAGMENTATION


def _weight_terms(weights: Iterable[Component]) -> Iterable[Term]:
    for component in weights:
        for cut, num_bytes in (
            ("sharded", component.sharded_bytes),
            ("replicated", component.replicated_bytes),
        ):
            if num_bytes:
                yield Term("weights", component.name, num_bytes, "exact", cut)


def _slot_terms(model: ModelConfig, settings: MemorySettings) -> Iterable[Term]:
    taken = CacheBytes.of(CacheShapes.of(model, settings.max_num_seqs, 0, 2))
    slots = f"{settings.max_num_seqs} sequences"
    yield Term("caches", "window rings", taken.windows, "exact", slots)
    yield Term("caches", "half-group state", taken.halves, "exact", slots)


def _staging_terms(layout: ExpertLayout, settings: MemorySettings) -> Iterable[Term]:
    num_slots = settings.num_staging_slots
    yield Term("staging", "staging ring", num_slots * layout.page_bytes, "exact", f"{num_slots} slots")
    num_prefetched = min(int(settings.prefetch_mib * _MIB) // layout.page_bytes, layout.largest_layer)
    yield Term(
        "staging",
        "prefetch slots",
        _PREFETCH_SETS * num_prefetched * layout.page_bytes,
        "exact",
        f"{_PREFETCH_SETS} sets of {num_prefetched}",
    )


def _workspace_terms(model: ModelConfig, settings: MemorySettings) -> Iterable[Term]:
    num_rows, world_size = settings.max_num_batched_tokens, settings.world_size
    attention_row, index_row = attention_row_bytes(model, world_size), index_row_bytes(model, settings)
    yield Term(
        "workspace",
        "row tile",
        max(_tile_bytes(num_rows, attention_row), _tile_bytes(num_rows, index_row)),
        "estimate",
        "of attention or index scores",
    )
    yield Term(
        "workspace",
        "gathered index keys",
        settings.max_model_len * model.index_head_dim * (_BF16 + _FP32),
        "estimate",
        "of one sequence, as found and as float32",
    )
    yield Term(
        "workspace",
        "activations",
        num_rows * activation_row_bytes(model, settings),
        "estimate",
        f"{num_rows} rows at the widest place of a layer",
    )
    yield Term(
        "workspace",
        "an FP8 weight in bf16",
        largest_fp8_matrix(model, world_size) * _BF16,
        "estimate",
        "the largest, for its product with more than 64 rows",
    )
    num_gathered = 2 + 1 / world_size if world_size > 1 else 1
    yield Term(
        "workspace",
        "logits",
        int(
            model.vocab_size * (settings.max_num_seqs * num_gathered * _FP32 + SAMPLED_ROWS * _SAMPLER_BYTES)
        ),
        "estimate",
        f"{settings.max_num_seqs} rows, and the sampler's copies of {SAMPLED_ROWS}",
    )


def _tile_bytes(num_rows: int, row_bytes: int) -> int:
    """Of `kernels.row_tiles.split_rows`."""
    return min(num_rows, max(1, TILE_BYTES // row_bytes)) * row_bytes


def attention_row_bytes(model: ModelConfig, world_size: int) -> int:
    """`kernels.reference.attention.attention_row_bytes` in float32 for a row of a rank."""
    num_keys, num_heads = model.sliding_window + model.index_topk, model.num_attention_heads // world_size
    key_bytes = num_keys * model.head_dim * (4 * _BF16 + _FP32)
    return key_bytes + 3 * num_heads * (num_keys + model.head_dim) * _FP32


def index_row_bytes(model: ModelConfig, settings: MemorySettings) -> int:
    """`kernels.reference.indexer.index_row_bytes` in float32 for a row that sees a whole context at ratio 1."""
    return 4 * model.index_n_heads * settings.max_model_len * _FP32


def activation_row_bytes(model: ModelConfig, settings: MemorySettings) -> int:
    """Of one row: what lives through a layer, and the most that any of its places adds."""
    hidden, copies, world_size = model.hidden_size, model.hc_mult, settings.world_size
    stream = copies * hidden
    heads_width = model.num_attention_heads // world_size * model.head_dim
    inter = model.moe_intermediate_size * settings.ep_size // world_size

    def all_reduce(width: int) -> int:
        # The rank's part, everyone's, and the sum before and after the last addition.
        return width * _FP32 * (1 if world_size == 1 else world_size + 3)

    index_tensors = (
        3 * 2 * model.sliding_window * _INT64
    )  # new and cached window keys, in three layouts of the rows
    picks = 4 * model.index_topk * _INT64 + 2 * settings.max_model_len // model.candidate_block_size
    kept = 2 * stream * _BF16 + 3 * hidden * _BF16 + index_tensors + picks
    engram_width = (copies + 1) * hidden if model.engram_layer_ids else 0
    places = (
        (copies + 3) * stream * _FP32,  # expand: each copy times each weight, and their sums
        2 * stream * _FP32,  # mixes: the stream and its squares
        all_reduce(engram_width) + engram_width * _BF16 + 4 * stream * _FP32,
        heads_width * (2 * _FP32 + 3 * _BF16)
        + all_reduce(hidden),  # queries, rotated and not, and their outputs
        model.num_experts_per_tok * (hidden + inter) * _BF16 + 2 * hidden * _FP32 + all_reduce(hidden),
    )
    return kept + max(places)
