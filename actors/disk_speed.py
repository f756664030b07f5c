"""How fast a file's disk reads, whatever the page cache holds of it: what loading is measured against."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

_BLOCK_BYTES: Final = 4 * 2**20


def read_speed(path: Path, num_threads: int, max_bytes: int) -> float | None:
    """Read blocks spread over a file, past the page cache.

    Args:
        path: a file.
        num_threads: that read at once.
        max_bytes: to read.
    Returns: bytes a second; None if the file is smaller than a block or its file system cannot do that.
    Raises: OSError if the file cannot be read.
    """
    num_blocks = path.stat().st_size // _BLOCK_BYTES
    if num_blocks == 0:
        return None
    num_read = min(num_blocks, max(1, max_bytes // _BLOCK_BYTES))
    offsets = [i * num_blocks // num_read * _BLOCK_BYTES for i in range(num_read)]
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # tmpfs, for one, has no disk
        return None
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="disk-speed") as threads:
            start = time.perf_counter()
            total = sum(threads.map(lambda offset: _read_block(fd, offset), offsets))
            return total / (time.perf_counter() - start)
    finally:
        os.close(fd)


def _read_block(fd: int, offset: int) -> int:
    with mmap.mmap(-1, _BLOCK_BYTES) as aligned:
        return os.preadv(fd, [aligned], offset)
