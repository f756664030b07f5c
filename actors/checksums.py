"""Checksums of expert pages: one multiply-add for every eight bytes, on whichever device has the bytes.

    sum over i of word[i] * weight[i]  modulo 2**64,  weights odd and spread over all 64 bits

An odd weight has an inverse, so no change of a single word goes unnoticed; others do with a chance of about 2**-63.
It guards against damaged memory and torn writes, not against malice. A core does 9 GB/s of it (zlib's CRC-32: 2), and
a GPU checks pages as fast as they arrive, which a CRC would keep it from.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

_GOLDEN: Final = 0x9E3779B97F4A7C15 - 2**64
"""2**64 over the golden ratio, as int64: its multiples are spread evenly (Knuth, TAOCP 6.4)."""


def page_checksums(pages: Tensor) -> Tensor:
    """Checksum of every page.

    Args:
        pages: `[num_pages, page_bytes]` uint8, contiguous, `page_bytes` a multiple of 8.
    Returns: `[num_pages]` int64, on the device of `pages`.
    Notes: on a GPU it takes as much memory as `pages` for a moment.
    """
    words = pages.view(torch.int64)
    weights = _weights(words.shape[1], words.device)
    if words.device.type == "cpu":
        # numpy's integer product is twice as fast as torch's, and neither makes a copy.
        sums = [np.dot(page, weights.numpy()) for page in words.numpy()]
        return torch.tensor(np.array(sums, dtype=np.int64))
    return (words * weights).sum(dim=1)


def page_checksum(page: Tensor) -> int:
    """Checksum of one page: `[page_bytes]` uint8."""
    return int(page_checksums(page.unsqueeze(0)))


@lru_cache(maxsize=4)
def _weights(num_words: int, device: torch.device) -> Tensor:
    return (torch.arange(1, num_words + 1, dtype=torch.int64, device=device) * _GOLDEN) | 1
