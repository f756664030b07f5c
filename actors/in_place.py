"""InPlaceLayers: layers of which the device can read every page where it is, so that no host waits for the routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.page_reader import PageReader
from kernels.formats import check_page_addresses
from placement.plan import PlacementPlan


@dataclass(frozen=True, slots=True)
class InPlaceLayers:
    """What can be read in place, layer by layer."""

    addresses: tuple[Tensor | None, ...]
    """`[num_local_experts]` int64, on the device: resident slots and pages of the host pool. None for a layer with a
    page that is neither, or that the device cannot read there."""
    is_resident: tuple[bool, ...]
    """Whether a layer has no cold page."""
    is_cold: Tensor
    """`[num_layers, max_local]` bool, on the device."""


def find_in_place(
    pages: PageReader, plan: PlacementPlan, resident: Tensor, *, can_read_pool: bool
) -> InPlaceLayers:
    """Look which layers can be read in place.

    Args:
        pages: of the rank. Cold ones are checked now, if they were not yet.
        plan: which are hot.
        resident: `[plan.num_hot, page_bytes]` uint8, the hot pages, layer by layer.
        can_read_pool: whether the device of `resident` reads the host pool.
    """
    counts = pages.directory.experts_per_layer
    slots = iter(resident.unbind())
    is_cold = torch.ones(len(counts), max(counts), dtype=torch.bool)
    addresses: list[Tensor | None] = []
    for layer, num_local in enumerate(counts):
        known = {expert: next(slots).data_ptr() for expert in plan.hot_experts[layer]}
        is_cold[layer, list(known)] = False
        is_cold[layer, num_local:] = False
        cold = [expert for expert in range(num_local) if expert not in known]
        if cold and can_read_pool:
            known |= _addresses_in_pool(pages, layer, cold)
        check_page_addresses(known)
        is_complete = len(known) == num_local
        addresses.append(
            torch.tensor([known[e] for e in range(num_local)], device=resident.device)
            if is_complete
            else None
        )
    return InPlaceLayers(
        addresses=tuple(addresses),
        is_resident=tuple(len(hot) == count for hot, count in zip(plan.hot_experts, counts, strict=True)),
        is_cold=is_cold.to(resident.device),
    )


def _addresses_in_pool(pages: PageReader, layer: int, experts: Sequence[int]) -> dict[int, int]:
    found = {expert: pages.in_place(pages.directory.index(layer, expert)) for expert in experts}
    return {expert: page.data_ptr() for expert, page in found.items() if page is not None}
