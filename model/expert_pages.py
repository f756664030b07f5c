"""Expert pages: a rank's share of an expert, cut out of the checkpoint. Source: `spec/model.md` section 2."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.formats import MXFP4_GROUP, PageLayout
from kernels.reference.expert_pages import store_codes, store_scales
from model.config import ModelConfig
from model.parallel import ParallelLayout


class StoredTensors(Protocol):
    """What pages are cut out of: `model.checkpoint.Checkpoint`."""

    def read_into(
        self, out: Tensor, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> None:
        """Copy a part of a tensor to `out`; `columns` counts stored elements."""


def page_layout(config: ModelConfig, parallel: ParallelLayout) -> PageLayout:
    """Layout of every page of a rank, backbone and drafts."""
    inter = parallel.expert_slice(config.moe_intermediate_size)
    return PageLayout(config.hidden_size, inter.stop - inter.start)


def local_experts_per_layer(config: ModelConfig, parallel: ParallelLayout) -> tuple[int, ...]:
    """How many experts, whole or sliced, a rank holds of each layer; drafts after the backbone."""
    return tuple(
        len(parallel.local_experts(config.num_experts_of(layer)))
        for layer in range(config.num_layers_with_drafts)
    )


def fill_page(
    out: Tensor,
    tensors: StoredTensors,
    config: ModelConfig,
    parallel: ParallelLayout,
    layer: int,
    expert: int,
) -> None:
    """Copy a rank's share of one expert from the checkpoint to a page.

    Args:
        out: `[page_layout(config, parallel).num_bytes]` uint8, contiguous, on the CPU.
        tensors: the checkpoint.
        config: its dimensions.
        parallel: which share.
        layer: layer id, draft stages after the backbone.
        expert: local index.
    Raises: CheckpointError if a scale is NaN or a file cannot be read.
    """
    layout = page_layout(config, parallel)
    name = _expert_name(config, parallel, layer, expert)
    inter = parallel.expert_slice(config.moe_intermediate_size)
    hidden, width = layout.hidden_size, layout.intermediate_size

    def read_codes(weight: str, num_rows: int, num_columns: int, **part: slice) -> Tensor:
        codes = out.new_empty(num_rows, num_columns // 2)
        tensors.read_into(codes, f"{name}.{weight}.weight", **part)
        return codes

    store_codes(out[layout.gate_codes], read_codes("w1", width, hidden, rows=inter))
    store_codes(out[layout.up_codes], read_codes("w3", width, hidden, rows=inter))
    packed = slice(inter.start // 2, inter.stop // 2)
    store_codes(out[layout.down_codes], read_codes("w2", hidden, width, columns=packed))
    sections = (layout.gate_scales, layout.up_scales, layout.down_scales)
    for section, scales in zip(sections, read_scales(tensors, config, parallel, layer, expert), strict=True):
        store_scales(out[section], scales)


def read_scales(
    tensors: StoredTensors, config: ModelConfig, parallel: ParallelLayout, layer: int, expert: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of gate, up and down of a rank's share of one expert: `[rows, columns // 32]` uint8, row-major.

    Args: see `fill_page`.
    Raises: CheckpointError if one is NaN or a file cannot be read.
    """
    layout = page_layout(config, parallel)
    name = _expert_name(config, parallel, layer, expert)
    inter = parallel.expert_slice(config.moe_intermediate_size)
    hidden, width = layout.hidden_size, layout.intermediate_size
    gate, up = (torch.empty(width, hidden // MXFP4_GROUP, dtype=torch.uint8) for _ in range(2))
    tensors.read_into(gate, f"{name}.w1.scale", rows=inter)
    tensors.read_into(up, f"{name}.w3.scale", rows=inter)
    down = torch.empty(hidden, width // MXFP4_GROUP, dtype=torch.uint8)
    groups = slice(inter.start // MXFP4_GROUP, inter.stop // MXFP4_GROUP)
    tensors.read_into(down, f"{name}.w2.scale", columns=groups)
    return gate, up, down


def _expert_name(config: ModelConfig, parallel: ParallelLayout, layer: int, expert: int) -> str:
    expert_id = parallel.local_experts(config.num_experts_of(layer))[expert]
    return f"{config.layer_names[layer]}.ffn.experts.{expert_id}"
