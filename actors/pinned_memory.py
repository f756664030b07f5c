"""PinnedMemory: host memory that a GPU copies from at the link's full speed and reads in place."""

from __future__ import annotations

import logging
import math
import mmap
import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from torch import Tensor

from actors.cuda_driver import CudaDriverError

logger = logging.getLogger(__name__)

MAX_CHUNK_BYTES: Final = 64 * 2**30
"""Larger registrations fail on some drivers."""


class PinError(RuntimeError):
    """Host memory cannot be registered with CUDA."""


class PinDriver(Protocol):
    """Registers ranges of host memory with a device."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin a range, which then has the same address on the device.

        Raises: CudaDriverError; nothing is pinned then.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises: CudaDriverError."""


class PinnedMemory:
    """Pages of a mapping, registered until `close`.

    Registered in chunks that end where a page ends: a copy whose source lies in two registrations is refused.

    Args:
        pages: `[num_pages, page_bytes]` uint8 on the host, contiguous, starting where a page of the machine does.
        driver: of the device that reads them.
        max_chunk_bytes: of one registration, unless a single page needs more.
    Raises: PinError that says how much was asked for and what to do; nothing stays registered then.
    """

    def __init__(self, pages: Tensor, driver: PinDriver, max_chunk_bytes: int = MAX_CHUNK_BYTES) -> None:
        self._driver = driver
        self._pages: Tensor | None = pages  # stays mapped as long as it is registered
        self._registered: list[int] = []
        start = time.perf_counter()
        for address, num_bytes in chunks(pages, max_chunk_bytes):
            try:
                driver.register(address, num_bytes)
            except CudaDriverError as error:
                self.close()
                raise PinError(
                    f"{num_bytes / 2**30:.2f} GiB of the {pages.nbytes / 2**30:.2f} GiB of expert pages cannot be "
                    f"registered with CUDA: {error}. Raise the limit of locked memory (ulimit -l), or set "
                    "shard.allow_unpinned to go on with slow copies"
                ) from error
            self._registered.append(address)
        logger.info(
            "%.2f GiB of expert pages registered with CUDA in %d chunks, %.2f s",
            *(pages.nbytes / 2**30, len(self._registered), time.perf_counter() - start),
        )

    @property
    def chunk_starts(self) -> Sequence[int]:
        """Addresses at which a registration begins."""
        return tuple(self._registered)

    def close(self) -> None:
        """Unregister all of it, the last chunk first; safe to call twice.

        What cannot be unregistered is logged: the driver lets go of it when the process ends.
        """
        while self._registered:
            try:
                self._driver.unregister(self._registered.pop())
            except CudaDriverError as error:
                logger.error("expert pages stay registered: %s", error)
        self._pages = None


def chunks(pages: Tensor, max_chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Address and bytes of each registration; every one but the last ends where pages of both kinds end."""
    if pages.numel() == 0:
        return
    assert pages.is_contiguous(), f"{pages.stride()=}"
    assert pages.data_ptr() % mmap.PAGESIZE == 0, f"{pages.data_ptr()=:#x}"
    unit = math.lcm(pages.shape[1], mmap.PAGESIZE)
    chunk = max(unit, max_chunk_bytes // unit * unit)
    for offset in range(0, pages.nbytes, chunk):
        yield pages.data_ptr() + offset, min(chunk, pages.nbytes - offset)
