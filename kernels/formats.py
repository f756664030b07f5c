"""Number formats and page layout shared by kernels, references and the host pool. No torch, no triton.

Source: `spec/model.md` section 0 (quantisers) and 2.2 (packing); OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

E2M1_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of codes 0..7; bit 3 of a code is the sign."""
E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0
UE8M0_BIAS: Final = 127
"""Scale byte `e` means `2 ** (e - 127)`."""
UE8M0_NAN: Final = 255
MXFP4_GROUP: Final = 32
"""Columns of one row that share a ue8m0 scale in an mxfp4 tensor."""
NVFP4_GROUP: Final = 16
"""Columns that share an e4m3 scale in a compressed KV entry."""
TILE_ROWS: Final = 16
"""Rows of a tile of an expert page: what one `mma` instruction multiplies."""
TILE_GROUPS: Final = 4
"""Scale groups of a wide tile of an expert page: 128 columns, four words for each of the lanes that share a row."""
FP8_TILE: Final = 32
"""Rows and columns of the tile that shares a ue8m0 scale in a dense FP8 weight."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Byte layout of one expert page: one expert's share on one rank, contiguous.

    Sections in order: gate codes `w1` `[inter, hidden // 2]`, up codes `w3` (same shape), their scales
    `[inter, hidden // 32]` twice, down codes `w2` `[hidden, inter // 2]`, its scales `[hidden, inter // 32]`. All
    uint8; two e2m1 codes a byte, low nibble first.

    A section is stored in tiles, so that a warp reads a tile from consecutive addresses. Rows are taken in blocks of
    TILE_ROWS, one after the other; a block goes from left to right through *wide* tiles of TILE_GROUPS scale
    groups and, for the columns that are left, *narrow* tiles of one group. A tile of codes is `[2 (half), 8 (row),
    group, 16 (byte)]`, one of scales `[8 (row), group, 2 (half)]`, both for row `2 * row + half` of the block: a lane
    has two rows, and they are neighbours in what it writes.

    Invariant: a page is complete by itself; codes and scales are never stored apart.
    """

    hidden_size: int
    intermediate_size: int
    """Width of this rank's slice of the expert's intermediate dimension."""

    def __post_init__(self) -> None:
        if self.hidden_size % MXFP4_GROUP or self.intermediate_size % MXFP4_GROUP:
            raise ValueError(
                f"an expert page needs hidden_size and intermediate_size in multiples of {MXFP4_GROUP}, "
                f"got {self.hidden_size} and {self.intermediate_size}"
            )

    @property
    def gate_codes(self) -> slice:
        """Bytes of the gate (`w1`) codes."""
        return slice(0, self._codes_bytes)

    @property
    def up_codes(self) -> slice:
        """Bytes of the up (`w3`) codes."""
        return slice(self._codes_bytes, 2 * self._codes_bytes)

    @property
    def gate_scales(self) -> slice:
        """Bytes of the gate (`w1`) scales."""
        start = 2 * self._codes_bytes
        return slice(start, start + self._scales_bytes)

    @property
    def up_scales(self) -> slice:
        """Bytes of the up (`w3`) scales."""
        start = 2 * self._codes_bytes + self._scales_bytes
        return slice(start, start + self._scales_bytes)

    @property
    def down_codes(self) -> slice:
        """Bytes of the down (`w2`) codes."""
        start = 2 * (self._codes_bytes + self._scales_bytes)
        return slice(start, start + self._codes_bytes)

    @property
    def down_scales(self) -> slice:
        """Bytes of the down (`w2`) scales."""
        start = 3 * self._codes_bytes + 2 * self._scales_bytes
        return slice(start, start + self._scales_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of one page; also the distance between neighbouring pages in a pool region."""
        return 3 * (self._codes_bytes + self._scales_bytes)

    @property
    def _codes_bytes(self) -> int:
        return self.hidden_size * self.intermediate_size // 2

    @property
    def _scales_bytes(self) -> int:
        return self.hidden_size * self.intermediate_size // MXFP4_GROUP


PAGE_ALIGNMENT: Final = 16
"""Bytes: the width of a kernel's load."""


def check_page_addresses(addresses: Mapping[int, int]) -> None:
    """Refuse pages that a kernel could not read.

    Args:
        addresses: byte address by local expert.
    Raises: ValueError that names the entry.
    """
    for expert, address in addresses.items():
        if address == 0:
            raise ValueError(f"addresses[{expert}] is 0: the page has no address")
        if address % PAGE_ALIGNMENT:
            raise ValueError(
                f"addresses[{expert}] is {address:#x}: pages must be aligned to {PAGE_ALIGNMENT} bytes"
            )
