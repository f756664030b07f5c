"""AddressTable: where each expert's page is, for kernels that read it on the device and a host that changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.formats import check_page_addresses


class AddressTable:
    """The address to read each expert's page from, on the computing device; 0 if never set."""

    def __init__(self, experts_per_layer: Sequence[int], device: torch.device) -> None:
        self._rows = [torch.zeros(count, dtype=torch.int64, device=device) for count in experts_per_layer]
        self._known: list[dict[int, int]] = [{} for _ in experts_per_layer]
        """What the rows hold, on the host."""

    def row(self, layer: int) -> Tensor:
        """`[num_local_experts]` int64."""
        return self._rows[layer]

    def update(self, layer: int, addresses: Mapping[int, int]) -> None:
        """Set experts' addresses, in order with the computation.

        Raises: ValueError for an address that a kernel cannot read.
        """
        check_page_addresses(addresses)
        changed = {e: address for e, address in addresses.items() if self._known[layer].get(e) != address}
        if not changed:
            return
        self._known[layer].update(changed)
        row = self._rows[layer]
        experts, values = _to_device([list(changed), list(changed.values())], row.device)
        row[experts] = values


def _to_device(values: list[list[int]], device: torch.device) -> Tensor:
    """An int64 tensor, copied without waiting for what the device still computes."""
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
