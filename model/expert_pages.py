"""Expert pages: a rank's share of an expert, cut out of the checkpoint. Source: `spec/model.md` section 2."""

from __future__ import annotations

from typing import Protocol

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
    expert_id = parallel.local_experts(config.num_experts_of(layer))[expert]
    name = f"{config.layer_names[layer]}.ffn.experts.{expert_id}"
    inter = parallel.expert_slice(config.moe_intermediate_size)
    hidden, width = layout.hidden_size, layout.intermediate_size

    def read(tensor: str, num_rows: int, num_columns: int, **part: slice) -> Tensor:
        matrix = out.new_empty(num_rows, num_columns)
        tensors.read_into(matrix, f"{name}.{tensor}", **part)
        return matrix

    for weight, codes, scales in (
        ("w1", layout.gate_codes, layout.gate_scales),
        ("w3", layout.up_codes, layout.up_scales),
    ):
        store_codes(out[codes], read(f"{weight}.weight", width, hidden // 2, rows=inter))
        store_scales(out[scales], read(f"{weight}.scale", width, hidden // MXFP4_GROUP, rows=inter))
    packed = slice(inter.start // 2, inter.stop // 2)
    groups = slice(inter.start // MXFP4_GROUP, inter.stop // MXFP4_GROUP)
    store_codes(out[layout.down_codes], read("w2.weight", hidden, width // 2, columns=packed))
    store_scales(out[layout.down_scales], read("w2.scale", hidden, width // MXFP4_GROUP, columns=groups))
