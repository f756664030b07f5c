"""AddressMailbox: page addresses from the host to kernels, past a copy engine that may be busy for milliseconds.

A GPU has one engine for copies from the host, and it finishes a run of pages before it looks at a few hundred bytes of
another stream. A kernel that reads the host's memory itself does not stand in that line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from kernels.formats import check_page_addresses
from kernels.reference.experts import view_memory

_NUM_BOXES: Final = 64
"""Messages under way. The host seldom waits: it is a few groups ahead of the device."""


class AddressMailbox:
    """Sends tables of addresses, in order with the computation.

    Args:
        max_local: entries of the largest table.
        device: that computes.
    """

    def __init__(self, max_local: int, device: torch.device) -> None:
        self._device = device
        self._num_sent = 0
        if device.type == "cuda":
            boxes = torch.zeros(_NUM_BOXES, max_local, dtype=torch.int64).pin_memory()
            self._boxes = boxes
            self._written = boxes.numpy()
            self._seen = [
                view_memory(box.data_ptr(), box.nbytes, device).view(torch.int64) for box in boxes.unbind()
            ]
            self._read: list[torch.cuda.Event | None] = [None] * _NUM_BOXES
            """When each box has been read; None if it holds nothing."""

    def send(self, addresses: Mapping[int, int], num_local: int) -> Tensor:
        """Make a table.

        Args:
            addresses: by local expert.
            num_local: experts.
        Returns: `[num_local]` int64 on the device, 0 where there is no address.
        Raises: ValueError for an address that a kernel cannot read.
        """
        check_page_addresses(addresses)
        experts, values = list(addresses), list(addresses.values())
        if self._device.type == "cpu":
            table = torch.zeros(num_local, dtype=torch.int64)
            table[experts] = torch.tensor(values, dtype=torch.int64)
            return table
        index = self._num_sent % _NUM_BOXES
        self._num_sent += 1
        if (read := self._read[index]) is not None:
            read.synchronize()
        box = self._written[index]
        box[:num_local] = 0
        box[experts] = values
        table = self._seen[index][:num_local] + 0  # a kernel, which reads the host's memory
        self._read[index] = torch.cuda.current_stream(self._device).record_event()
        return table
