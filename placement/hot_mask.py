"""Hot sets of all ranks as masks `[num_layers, num_experts]`, for simulation: by weight, and with whole cold layers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from placement.constants import LAYER_RANK_BYTES, NUM_EXPERTS, NUM_LAYERS, RANK_EXPERT_BYTES
from placement.cost_model import page_bytes

Mask = NDArray[np.bool_]
BYTES_PER_GIB = 1 << 30


def num_hot_pages(offload_gib: float, ep_size: int) -> int:
    """Pages of one rank that stay if at least `offload_gib` of its experts go.

    Raises: ValueError if a rank does not have as much.
    """
    offload_bytes = offload_gib * BYTES_PER_GIB
    if not 0 <= offload_bytes <= RANK_EXPERT_BYTES:
        raise ValueError(
            f"offload must be between 0 and {RANK_EXPERT_BYTES / BYTES_PER_GIB:.2f} GiB, got {offload_gib}"
        )
    num_pages = NUM_LAYERS * NUM_EXPERTS // ep_size
    return num_pages - math.ceil(offload_bytes / page_bytes(ep_size))


def hot_by_weight(weights: NDArray[np.number], num_hot: int, ep_size: int) -> Mask:
    """The `num_hot` heaviest pages of every group of ranks, as `placement.hot_set.hottest` chooses them for one.

    Args:
        weights: expected reads by layer and expert, `[num_layers, num_experts]`.
        num_hot: pages of one rank.
        ep_size: groups; a group holds consecutive experts.
    """
    num_layers, num_experts = weights.shape
    by_group = weights.reshape(num_layers, ep_size, -1).swapaxes(0, 1).reshape(ep_size, -1)
    order = np.argsort(-by_group, axis=1, kind="stable")[:, :num_hot]
    mask = np.zeros(by_group.shape, bool)
    np.put_along_axis(mask, order, True, axis=1)
    return mask.reshape(ep_size, num_layers, -1).swapaxes(0, 1).reshape(num_layers, num_experts)


def whole_layers_cold(offload_gib: float) -> Mask:
    """The published baseline: as many whole layers are cold as it takes to move `offload_gib`, spread evenly."""
    num_hot_pages(offload_gib, 1)
    num_cold = math.ceil(offload_gib * BYTES_PER_GIB / LAYER_RANK_BYTES)
    mask = np.ones((NUM_LAYERS, NUM_EXPERTS), bool)
    mask[np.arange(num_cold) * NUM_LAYERS // max(num_cold, 1)] = False
    return mask
