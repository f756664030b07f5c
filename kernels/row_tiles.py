"""Tiles of rows: what needs a lot of memory for every row is computed for a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

TILE_BYTES = 1 << 30
"""Memory that the intermediate values of one tile may take. Small beside a GPU's memory; large enough that a tile of
the release keeps a GPU busy (230 rows of attention, 32 of index scores at 64k tokens) and that decoding is one tile."""


def split_rows(begin: int, end: int, row_bytes: int) -> Iterator[slice]:
    """Cut the rows `begin .. end - 1`, each of which needs `row_bytes` of memory, into tiles of at least one row."""
    tile_rows = max(1, TILE_BYTES // max(1, row_bytes))
    return (slice(row, min(row + tile_rows, end)) for row in range(begin, end, tile_rows))
