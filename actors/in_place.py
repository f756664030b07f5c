"""InPlaceLayers: layers of which the device can read every page where it is, so that no host waits for the routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from actors.address_mailbox import AddressMailbox
from actors.page_reader import PageReader


class InPlaceLayers:
    """What can be read in place, layer by layer.

    Args:
        pages: of the rank. Cold ones are checked when they are first found here.
        can_read_pool: whether the device reads the host pool.
        device: that computes.
    """

    def __init__(self, pages: PageReader, device: torch.device, *, can_read_pool: bool) -> None:
        counts = pages.directory.experts_per_layer
        self._pages = pages
        self._can_read_pool = can_read_pool
        self._mailbox = AddressMailbox(max(counts), device)
        self.addresses: list[Tensor | None] = [None] * len(counts)
        """`[num_local_experts]` int64, on the device: resident slots and pages of the host pool. None for a layer
        with a page that is neither, or that the device cannot read there."""
        self.is_resident = [False] * len(counts)
        """Whether a layer has no cold page."""
        self.is_cold = torch.zeros(len(counts), max(counts), dtype=torch.bool, device=device)
        """`[num_layers, max_local]`, on the device."""
        self._in_pool: list[dict[int, int | None]] = [{} for _ in counts]
        """Address in the pool by layer and expert, as far as it was asked for; None if the page is not there."""

    def update(self, layer: int, hot: Mapping[int, int]) -> None:
        """Look again where a layer's pages are; in order with the computation.

        Args:
            layer: whose hot set is new.
            hot: address by expert of those that are resident.
        """
        num_local = self._pages.directory.experts_per_layer[layer]
        cold = [expert for expert in range(num_local) if expert not in hot]
        known = dict(hot)
        if cold and self._can_read_pool:
            known |= self._addresses_in_pool(layer, cold)
        self.is_resident[layer] = not cold
        is_resident = self._mailbox.send(hot, num_local) != 0
        self.is_cold[layer, :num_local] = ~is_resident
        if len(known) < num_local:
            self.addresses[layer] = None
            return
        addresses = self._mailbox.send(known, num_local)
        if (present := self.addresses[layer]) is None:
            self.addresses[layer] = addresses
        else:
            present.copy_(addresses)

    def _addresses_in_pool(self, layer: int, experts: Sequence[int]) -> dict[int, int]:
        cache = self._in_pool[layer]
        for expert in experts:
            if expert not in cache:
                page = self._pages.in_place(self._pages.directory.index(layer, expert))
                cache[expert] = None if page is None else page.data_ptr()
        return {e: address for e in experts if (address := cache[e]) is not None}
