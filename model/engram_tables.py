"""Sizes of the Engram tables: each look-up column has a table of its own, as long as a prime. No torch.

Source: `spec/model.md` section 7.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from model.config import ModelConfig


def engram_table_sizes(config: ModelConfig) -> dict[int, tuple[int, ...]]:
    """Rows of each look-up column's table, by Engram layer: `(ngram - 1) * heads` primes, n-gram length major.

    Every prime from `engram_vocab_size` on is used once, over all layers.
    """
    primes = _primes_from(config.engram_vocab_size)
    num_columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    return {layer: tuple(next(primes) for _ in range(num_columns)) for layer in config.engram_layer_ids}


def _primes_from(start: int) -> Iterator[int]:
    """Primes not below `start`, ascending; trial division, enough for the table sizes in use."""
    number = start
    while True:
        if number > 1 and all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            yield number
        number += 1
