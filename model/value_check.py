"""Find stored values that no weight may have: NaN, infinities, and the ue8m0 code of NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.formats import UE8M0_NAN
from model.inventory import StoredDtype


@dataclass(frozen=True, slots=True)
class BadValue:
    """Where it is, and what."""

    index: int
    meaning: str


class _BadPatterns(NamedTuple):
    """Bit patterns from `first` on, once the sign has been shifted out."""

    word: type[np.unsignedinteger[Any]]
    has_sign: bool
    first: int
    meaning: str


_BAD_PATTERNS: Final = {
    StoredDtype.F8_E8M0: _BadPatterns(np.uint8, False, UE8M0_NAN, "the ue8m0 code of NaN"),
    StoredDtype.F8_E4M3: _BadPatterns(np.uint8, True, 0x7F << 1, "NaN"),
    StoredDtype.BF16: _BadPatterns(np.uint16, True, 0x7F80 << 1, "not finite"),
    StoredDtype.F32: _BadPatterns(np.uint32, True, 0x7F800000 << 1, "not finite"),
}
"""All formats that have some: every e2m1 code is a number."""
_WORDS_AT_A_TIME = 1 << 18
"""The scratch copy stays in the CPU's cache, and small beside a table of 100 GB."""


def find_bad_value(stored: npt.NDArray[np.uint8], dtype: StoredDtype) -> BadValue | None:
    """The first value that is not a number.

    Args:
        stored: `[num_elements * dtype.num_bytes]` uint8, contiguous, as in the file.
        dtype: of the elements.
    Returns: its index among the elements, or None.
    """
    if dtype not in _BAD_PATTERNS:
        return None
    word, has_sign, first, meaning = _BAD_PATTERNS[dtype]
    words = stored.view(word)
    for start in range(0, len(words), _WORDS_AT_A_TIME):
        magnitudes = words[start : start + _WORDS_AT_A_TIME]
        if has_sign:
            # Shifts left by one; NumPy's shift of bytes is ten times slower than its addition.
            magnitudes = magnitudes + magnitudes
        if magnitudes.max() >= first:
            return BadValue(start + int(np.argmax(magnitudes >= first)), meaning)
    return None
