"""Components of a checkpoint: what each takes in the files, and what a rank keeps of it and where.

Source: `spec/model.md` section 11 for the components, `model.weights` for what a rank keeps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Final

import msgspec

from kernels.formats import MXFP4_GROUP
from model.config import CheckpointConfig, ModelConfig
from model.engram_tables import engram_table_sizes
from model.inventory import StoredDtype, TensorSpec, expected_tensors
from model.parallel import ParallelLayout

ROUTED_EXPERTS: Final = "routed experts"
DRAFT_EXPERTS: Final = "DSpark routed experts"
ENGRAM_TABLES: Final = "engram tables"
VISION: Final = "vision, aligner, delimiters"
_COMPONENTS: Final = {
    ROUTED_EXPERTS: r"layers\.\d+\.ffn\.experts\..*",
    "shared experts": r"layers\.\d+\.ffn\.shared_experts\..*",
    "attention core": r"layers\.\d+\.attn\.(?!indexer|compressor).*",
    "indexers": r"layers\.\d+\.attn\.indexer\..*",
    "compressors": r"layers\.\d+\.attn\.compressor\..*",
    "routers": r"layers\.\d+\.ffn\.gate\..*",
    "hyper-connections": r"layers\.\d+\.hc_.*",
    "layer norms": r"layers\.\d+\.(?:attn|ffn)_norm\.weight",
    "engram projections": r"layers\.\d+\.engram\.(?!embed).*",
    "embed": r"embed\.weight",
    "head": r"head\.weight",
    "final norm": r"norm\.weight",
    ENGRAM_TABLES: r"layers\.\d+\.engram\.embed\..*",
    DRAFT_EXPERTS: r"mtp\.\d+\.ffn\.experts\..*",
    "DSpark other": r"mtp\.\d+\.(?!ffn\.experts\.).*",
    VISION: r"(?:vision\.|aligner\.|image_).*",
}
"""Pattern of the whole name of a component's tensors. Exactly one fits a tensor."""
_COMPONENT = re.compile("|".join(f"({pattern})" for pattern in _COMPONENTS.values()))
_OF_NO_RANK = re.compile(r"(vision\.|aligner\.|image_).*|.*\.ffn\.gate\.bias_vl")
"""For images, which are not served."""
_SHARDED = re.compile(
    r"(embed|head)\.weight"
    r"|.*\.attn\.(wq_b|wo_a|wo_b)\..*|.*\.attn\.attn_sink"
    r"|.*\.shared_experts\..*"
    r"|.*\.engram\.wkv\..*"
    r"|.*\.markov_head\.head\.weight"
)
"""Of which each rank keeps an equal part. Of the others but experts and tables it keeps all."""


class Component(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One component of a checkpoint, and what a rank keeps of it."""

    name: str
    num_tensors: int
    num_parameters: int
    """Values without scales; an MXFP4 byte holds two."""
    num_bytes: int
    """As stored, with scales."""
    sharded_bytes: int
    """On a rank's device, of tensors that are cut over the ranks."""
    replicated_bytes: int
    """On a rank's device, of tensors that every rank keeps whole."""

    @property
    def device_bytes(self) -> int:
        """On a rank's device; expert pages and Engram tables, which are in host memory first, not counted."""
        return self.sharded_bytes + self.replicated_bytes


def components(config: CheckpointConfig, world_size: int = 1) -> tuple[Component, ...]:
    """All components of a checkpoint, in the order of the specification's table; without vision if it has none.

    Args:
        config: the whole `config.json`.
        world_size: ranks; they keep equally much.
    Raises: pydantic.ValidationError if `vision_config` has other keys than the release.
    """
    groups: dict[str, dict[str, TensorSpec]] = {name: {} for name in _COMPONENTS}
    for tensor, spec in expected_tensors(config).items():
        groups[component_of(tensor)][tensor] = spec
    return tuple(_component(name, tensors, world_size) for name, tensors in groups.items() if tensors)


def component_of(tensor: str) -> str:
    """Component that a tensor belongs to."""
    match = _COMPONENT.fullmatch(tensor)
    assert match is not None, f"{tensor=}"
    return list(_COMPONENTS)[(match.lastindex or 0) - 1]


def largest_fp8_matrix(config: ModelConfig, world_size: int) -> int:
    """Values of the largest dense FP8 matrix that a rank multiplies with, as `model.weights` stacks them."""
    hidden = config.hidden_size
    num_columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
    heads_width = config.num_attention_heads * config.head_dim // world_size
    index_width = config.index_n_heads * config.index_head_dim if config.index_source_layer_ids else 0
    groups_width = config.o_groups * config.o_lora_rank // world_size
    return max(
        len(config.dspark_target_layer_ids) * hidden * hidden if config.num_nextn_predict_layers else 0,
        (config.q_lora_rank + config.head_dim) * hidden,
        (heads_width + index_width) * config.q_lora_rank,
        config.o_lora_rank * config.num_attention_heads * config.head_dim // config.o_groups,
        hidden * groups_width,
        2 * config.moe_intermediate_size // world_size * hidden,
        (config.hc_mult + 1) * hidden * num_columns // world_size if config.engram_layer_ids else 0,
    )


def engram_table_bytes(config: ModelConfig, parallel: ParallelLayout) -> int:
    """Bytes of the table rows that a rank reads, which it keeps in host memory.

    Raises: ValueError if the look-up columns cannot be cut over the ranks.
    """
    num_rows = sum(sum(sizes[parallel.shard(len(sizes))]) for sizes in engram_table_sizes(config).values())
    return num_rows * (config.engram_head_dim + config.engram_head_dim // MXFP4_GROUP)


def _component(name: str, tensors: Mapping[str, TensorSpec], world_size: int) -> Component:
    sharded = replicated = 0
    if name not in (ROUTED_EXPERTS, DRAFT_EXPERTS, ENGRAM_TABLES):
        for tensor, spec in tensors.items():
            if _SHARDED.fullmatch(tensor):
                sharded += spec.num_bytes // world_size
            elif not _OF_NO_RANK.fullmatch(tensor):
                replicated += spec.num_bytes
    return Component(
        name=name,
        num_tensors=len(tensors),
        num_parameters=sum(map(_num_parameters, tensors.values())),
        num_bytes=sum(spec.num_bytes for spec in tensors.values()),
        sharded_bytes=sharded,
        replicated_bytes=replicated,
    )


def _num_parameters(spec: TensorSpec) -> int:
    if spec.dtype is StoredDtype.F8_E8M0:
        return 0
    return prod(spec.shape) * (2 if spec.dtype is StoredDtype.I8 else 1)
