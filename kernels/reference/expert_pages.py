"""Matrices of an expert page in tiles, and back. Source: `kernels.formats.PageLayout`; design section 4."""

from __future__ import annotations

from torch import Tensor

from kernels.formats import TILE_GROUPS, TILE_ROWS

_HALF_ROWS = TILE_ROWS // 2


def store_codes(section: Tensor, codes: Tensor) -> None:
    """Write a matrix of e2m1 codes to its section of a page.

    Args:
        section: `[num_rows * num_columns // 2]` uint8, contiguous.
        codes: `[num_rows, num_columns // 2]` uint8, row-major as in a checkpoint; `num_rows` a multiple of
            TILE_ROWS, `num_columns` of the scale group.
    """
    for tiles, part in zip(_code_tiles(section, len(codes)), _code_parts(codes), strict=True):
        tiles.copy_(part)


def load_codes(section: Tensor, num_rows: int) -> Tensor:
    """The inverse of `store_codes`: `[num_rows, num_columns // 2]` uint8."""
    codes = section.new_empty(num_rows, section.numel() // num_rows)
    for tiles, part in zip(_code_tiles(section, num_rows), _code_parts(codes), strict=True):
        part.copy_(tiles)
    return codes


def store_scales(section: Tensor, scales: Tensor) -> None:
    """Write a matrix of ue8m0 scales, `[num_rows, num_columns // 32]` uint8, to its section of a page."""
    for tiles, part in zip(_scale_tiles(section, len(scales)), _scale_parts(scales), strict=True):
        tiles.copy_(part)


def load_scales(section: Tensor, num_rows: int) -> Tensor:
    """The inverse of `store_scales`: `[num_rows, num_columns // 32]` uint8."""
    scales = section.new_empty(num_rows, section.numel() // num_rows)
    for tiles, part in zip(_scale_tiles(section, num_rows), _scale_parts(scales), strict=True):
        part.copy_(tiles)
    return scales


def _code_tiles(section: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """A section as its wide and its narrow tiles: `[block, tile, half, row, group, 16 (byte)]`."""
    blocks = section.view(num_rows // TILE_ROWS, -1, 16 * TILE_ROWS)  # [block, group, ...]
    num_wide = blocks.shape[1] // TILE_GROUPS * TILE_GROUPS
    wide, narrow = blocks[:, :num_wide], blocks[:, num_wide:]
    return (
        wide.unflatten(1, (-1, TILE_GROUPS)).flatten(2).unflatten(2, (2, _HALF_ROWS, TILE_GROUPS, 16)),
        narrow.unflatten(2, (2, _HALF_ROWS, 1, 16)),
    )


def _code_parts(codes: Tensor) -> tuple[Tensor, Tensor]:
    """A row-major matrix in the order of `_code_tiles`."""
    groups = codes.unflatten(1, (-1, 16)).unflatten(0, (-1, _HALF_ROWS, 2))  # [block, row, half, group, 16]
    num_wide = groups.shape[3] // TILE_GROUPS * TILE_GROUPS
    wide, narrow = groups[:, :, :, :num_wide], groups[:, :, :, num_wide:]
    return (
        wide.unflatten(3, (-1, TILE_GROUPS)).permute(0, 3, 2, 1, 4, 5),
        narrow.unsqueeze(4).permute(0, 3, 2, 1, 4, 5),
    )


def _scale_tiles(section: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """A section as its wide and its narrow tiles: `[block, tile, row, group, half]`."""
    blocks = section.view(num_rows // TILE_ROWS, -1, TILE_ROWS)  # [block, group, ...]
    num_wide = blocks.shape[1] // TILE_GROUPS * TILE_GROUPS
    wide, narrow = blocks[:, :num_wide], blocks[:, num_wide:]
    return (
        wide.unflatten(1, (-1, TILE_GROUPS)).flatten(2).unflatten(2, (_HALF_ROWS, TILE_GROUPS, 2)),
        narrow.unflatten(2, (_HALF_ROWS, 1, 2)),
    )


def _scale_parts(scales: Tensor) -> tuple[Tensor, Tensor]:
    """A row-major matrix in the order of `_scale_tiles`."""
    groups = scales.unflatten(0, (-1, _HALF_ROWS, 2))  # [block, row, half, group]
    num_wide = groups.shape[3] // TILE_GROUPS * TILE_GROUPS
    wide, narrow = groups[..., :num_wide], groups[..., num_wide:]
    return (
        wide.unflatten(3, (-1, TILE_GROUPS)).permute(0, 3, 1, 4, 2),
        narrow.unsqueeze(4).permute(0, 3, 1, 4, 2),
    )
