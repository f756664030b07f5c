"""Pages to a device at start: copied first, checked there, so that neither the link nor a core waits for the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from actors.page_reader import PageReader
from actors.staging import Copier

logger = logging.getLogger(__name__)

_CHECK_BYTES: Final = 128 * 2**20
"""Of the copies that are checked at once, which takes as much memory again for a moment."""


def load_pages(pages: PageReader, wanted: Sequence[int], copier: Copier, device: torch.device) -> Tensor:
    """Copy pages to device memory that keeps them.

    Args:
        pages: of the rank.
        wanted: page numbers.
        copier: for the device.
        device: where they go.
    Returns: `[len(wanted), page_bytes]` uint8.
    Raises: ExpertPageError if one is corrupt, in the checkpoint as well as in the pool.
    """
    start = time.perf_counter()
    loaded = torch.empty(len(wanted), pages.layout.num_bytes, dtype=torch.uint8, device=device)
    batches = list(zip(_batches(pages, wanted), torch.split(loaded, _batch_size(pages)), strict=False))
    started = [
        copier.start([partial(pages.peek, page) for page in batch], slots.unbind())
        for batch, slots in batches
    ]
    for (batch, slots), copies in zip(batches, started, strict=True):
        for copy in copies:
            copy.join()
        for page in pages.check_copies(batch, slots):
            slots[batch.index(page)].copy_(pages.read(page))
    rate = loaded.nbytes / max(time.perf_counter() - start, 1e-6) / 1e9
    logger.info("%d hot pages loaded and checked, %.2f GB/s", len(wanted), rate)
    return loaded


def check_pages(pages: PageReader, wanted: Sequence[int], copier: Copier, device: torch.device) -> None:
    """Check pages that will be read in place, in copies that are not kept.

    What is wrong with one shows when it is read.
    """
    scratch = torch.empty(_batch_size(pages), pages.layout.num_bytes, dtype=torch.uint8, device=device)
    for batch in _batches(pages, wanted):
        slots = scratch[: len(batch)]
        for copy in copier.start([partial(pages.peek, page) for page in batch], slots.unbind()):
            copy.join()
        pages.check_copies(batch, slots)


def _batch_size(pages: PageReader) -> int:
    return max(1, _CHECK_BYTES // pages.layout.num_bytes)


def _batches(pages: PageReader, wanted: Sequence[int]) -> list[Sequence[int]]:
    size = _batch_size(pages)
    return [wanted[i : i + size] for i in range(0, len(wanted), size)]
