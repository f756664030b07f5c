"""PagePrefetcher: while a layer computes, pages that the next one is predicted to read come to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import page_prefetch as kernels
from kernels.reference import page_prefetch as reference

MAX_PAIRS = kernels.MAX_PAIRS
"""Predicted choices of a prefetch."""


class PagePrefetcher:
    """Two sets of slots, of which one layer reads while the next one's are filled.

    Protocol: `start` for a layer before the experts of the one before it are computed, then `join` for it, after
    which its experts are computed; all in the order of the computing stream. A layer that is not started is read where
    it is.

    Invariants:
    - the slots of a set are filled only after whatever read them before was computed;
    - a table names a slot only once the page is in it, as far as the computing stream sees after `join`.

    Args:
        first_experts: global id of local expert 0, by layer.
        is_cold: `[num_layers, max_local]` bool, on the computing device: pages that are read in the host pool.
        num_slots: pages that one layer may prefetch: the byte budget.
        page_bytes: of every page.
    """

    def __init__(
        self, first_experts: Sequence[int], is_cold: Tensor, num_slots: int, page_bytes: int
    ) -> None:
        device = is_cold.device
        self._first_experts = first_experts
        self._is_cold = is_cold
        self._slots = torch.empty(2, num_slots, page_bytes, dtype=torch.uint8, device=device)
        self._tables = torch.empty(2, is_cold.shape[1], dtype=torch.int64, device=device)
        self.was_prefetched = torch.zeros_like(is_cold)
        """`[num_layers, max_local]` bool: pages that were brought for a layer since `clear`."""
        self._under_way: int | None = None
        """The layer that was started and not joined."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, layer: int, topk_idx: Tensor, addresses: Tensor) -> None:
        """Begin to bring what a layer is predicted to read.

        Args:
            layer: the next one.
            topk_idx: `[num_tokens, num_topk]` int64, predicted global expert ids, at most MAX_PAIRS.
            addresses: `[num_local_experts]` int64, where its pages are.
        """
        num_local, side = len(addresses), layer % 2
        arguments = (
            topk_idx,
            self._first_experts[layer],
            self._is_cold[layer, :num_local],
            addresses,
            self._slots[side],
            self._tables[side, :num_local],
            self.was_prefetched[layer, :num_local],
        )
        self._under_way = layer
        if self._stream is None:
            reference.prefetch_pages(*arguments)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._is_cold.device))
        with torch.cuda.stream(self._stream):
            kernels.prefetch_pages(*arguments)
        topk_idx.record_stream(self._stream)

    def join(self, layer: int, addresses: Tensor) -> Tensor:
        """Where the pages of a layer are for whatever is computed from now on: `[num_local_experts]` int64.

        Args:
            layer: that is computed next.
            addresses: where its pages are if nothing was started for it.
        """
        if self._under_way != layer:
            return addresses
        self._under_way = None
        if self._stream is not None:
            torch.cuda.current_stream(self._is_cold.device).wait_stream(self._stream)
        return self._tables[layer % 2, : len(addresses)]

    def clear(self) -> None:
        """Forget which pages were brought, once they are counted."""
        self.was_prefetched.zero_()
