"""PageReader: one rank's expert pages, wherever they are: in the host pool, or in the checkpoint alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Lock

import torch
from torch import Tensor

from actors.checksums import page_checksum
from actors.host_pool import MappedPool
from actors.page_directory import PageDirectory
from kernels.formats import PageLayout
from model.checkpoint import Checkpoint
from model.expert_pages import fill_page
from model.expert_source import ExpertPageError
from model.parallel import ParallelLayout
from model.shard_file import CheckpointError

logger = logging.getLogger(__name__)

FillPage = Callable[[Tensor, int], None]
"""Fill memory, `[page_bytes]` uint8, with a page of the checkpoint. Raises CheckpointError or OSError."""


def fill_from(checkpoint: Checkpoint, parallel: ParallelLayout, directory: PageDirectory) -> FillPage:
    """Read a rank's pages from a checkpoint."""

    def fill(out: Tensor, page: int) -> None:
        fill_page(out, checkpoint, checkpoint.config.text_config, parallel, *directory.locate(page))

    return fill


class PageReader:
    """Reads the pages of a rank.

    A page of the pool whose checksum differs is read from the checkpoint, once: what has the recorded checksum takes
    its place for as long as this reader lives, anything else makes the page an error for good.

    `read` may be called from several threads, but not for one page at once.

    Args:
        pool: what the rank has in host memory.
        fill: reads the checkpoint.
    """

    def __init__(self, pool: MappedPool, fill: FillPage) -> None:
        self.layout: PageLayout = pool.layout
        self.directory: PageDirectory = pool.directory
        self.first_experts = pool.first_experts
        """Global id of local expert 0, by layer."""
        self._pool = pool
        self._fill = fill
        self._repaired: dict[int, Tensor] = {}
        self._lost: dict[int, str] = {}
        self.num_disk_reads = [0] * len(self.directory.experts_per_layer)
        """Pages read from the checkpoint since start, by layer."""
        self._lock = Lock()

    def read(self, page: int) -> Tensor:
        """A page, in place if the pool has it: `[layout.num_bytes]` uint8.

        Raises: ExpertPageError that names layer, expert and reason.
        """
        if not self._pool.holds(page):
            return self._read_from_disk(page)
        if page in self._repaired:
            return self._repaired[page]
        if page in self._lost:
            raise ExpertPageError(self._lost[page])
        try:
            return self._pool.read(page)
        except ExpertPageError as error:
            return self._repair(page, error)

    def peek(self, page: int) -> Tensor:
        """What `read` returns, unless the pool has the page: then as it is, for `check_copies`.

        Raises: ExpertPageError.
        """
        return self._pool.peek(page) if self.is_in_pool(page) else self.read(page)

    def check_copies(self, pages: Sequence[int], copies: Tensor) -> list[int]:
        """Check copies of what `peek` returned; see MappedPool. Returns: pages whose copy is wrong."""
        at = [i for i, page in enumerate(pages) if self.is_in_pool(page)]
        if len(at) < len(pages):
            copies = copies[at]
        return self._pool.check_copies([pages[i] for i in at], copies)

    def in_place(self, page: int) -> Tensor | None:
        """A page where it lies in the pool, checked; None if there is no sound one."""
        if not self.is_in_pool(page):
            return None
        try:
            found = self.read(page)
        except ExpertPageError:
            return None
        return None if page in self._repaired else found

    def is_in_pool(self, page: int) -> bool:
        """Whether the pool has a page, and nothing is known against it."""
        return self._pool.holds(page) and page not in self._repaired and page not in self._lost

    def _repair(self, page: int, damage: ExpertPageError) -> Tensor:
        try:
            copy = self._read_from_disk(page)
            if page_checksum(copy) != self._pool.checksum(page):
                raise ExpertPageError("the checkpoint has other bytes now")
        except ExpertPageError as error:
            self._lost[page] = f"{damage}, and {error}"
            raise ExpertPageError(self._lost[page]) from error
        logger.error("%s; it was read from the checkpoint again", damage)
        self._repaired[page] = copy
        return copy

    def _read_from_disk(self, page: int) -> Tensor:
        out = torch.empty(self.layout.num_bytes, dtype=torch.uint8)
        try:
            self._fill(out, page)
        except (CheckpointError, OSError) as error:
            name = self._pool.name_of(page)
            raise ExpertPageError(f"{name} cannot be read from the checkpoint: {error}") from error
        with self._lock:
            self.num_disk_reads[self.directory.locate(page)[0]] += 1
        return out
