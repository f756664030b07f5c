"""PrefetchTrial: does prefetching make steps shorter? Their time decides, not how often a prediction was right."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from statistics import median
from typing import Final

logger = logging.getLogger(__name__)

NUM_SAMPLES: Final = 16
"""Steps of each kind in a trial; their medians are compared."""
NUM_STEPS_BETWEEN: Final = 4096
"""Steps for which a decision holds. A trial is then 1 % of all steps."""
_ORDER: Final = (True, False, False, True)
"""With and without take turns so that a drift of the step time favours neither."""


class PrefetchTrial:
    """Tries steps with and without, keeps what was faster, and looks again after a while.

    Steps of different sizes are tried apart. What to do depends on the numbers of steps alone, so that the ranks of an
    engine, whose steps last equally long, try both at the same time.

    Protocol: `begin` before each step, then `end` if it was timed.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def begin(self, num_rows: int) -> bool:
        """Returns: whether to prefetch in the next step, of `num_rows` rows."""
        size = self._sizes.setdefault(num_rows, _Size())
        if size.num_settled:
            size.num_settled -= 1
        return size.pays if size.num_settled else _ORDER[size.num_tried % len(_ORDER)]

    def end(self, num_rows: int, elapsed_s: float) -> None:
        """Take note of how long that step lasted."""
        size = self._sizes[num_rows]
        if size.num_settled:
            return
        size.times_s[_ORDER[size.num_tried % len(_ORDER)]].append(elapsed_s)
        size.num_tried += 1
        if size.num_tried == 2 * NUM_SAMPLES:
            with_, without = median(size.times_s[True]), median(size.times_s[False])
            logger.info(
                "%d rows a step: %.3f ms with prefetching, %.3f ms without",
                num_rows,
                1e3 * with_,
                1e3 * without,
            )
            self._sizes[num_rows] = _Size(pays=with_ < without, num_settled=NUM_STEPS_BETWEEN)


@dataclass(slots=True)
class _Size:
    pays: bool = False
    num_settled: int = 0
    """Steps for which `pays` still holds; 0 during a trial."""
    num_tried: int = 0
    times_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
