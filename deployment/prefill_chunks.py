"""PrefillChunks: how many prompt rows a step may have beside running decodes, from what steps took."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque

NUM_SAMPLES = 16
"""Steps of a kind that count: enough for a median, few enough to follow a context that grows."""
MIN_DECODE_SAMPLES = 5
"""A median of five is not moved by two steps that took long, as first steps do."""
PROBE_INTERVAL = 256
"""Steps after which the time without prompt rows is measured again."""
NUM_LATEST = 4
"""Of these steps with prompt rows, the largest chunk says which size is in use: a prompt's last chunk is small."""
MAX_GROWTH = 2
"""How much larger than that the next chunk may be, and how much smaller those that say what rows cost: the first rows
may cost nothing, if a step waits for weights meanwhile."""


class PrefillChunks:
    """Keeps steps with prompt rows within `max_itl_factor` times what they would take without.

    The model is `step_s = a + b * num_prefill_rows`. `a` is the median of recent steps without prompt rows and about as
    many decodes: between two powers of two. `b` minimizes the sum of absolute errors over recent steps whose chunks
    are not much smaller than those in use, which is the median of their `(step_s - a) / num_prefill_rows`, weighted by
    their rows: a step that took long for another reason moves neither. A cost that comes with a chunk of any size, as
    that of cold pages that all cross the link, makes `b` larger for small chunks. The chunk then settles where the
    bound is met, since `b` comes from chunks of about that size; if none meets it, at `min_rows`. A chunk that costs
    much more than smaller ones let expect, which happens while chunks grow, misses the bound until it is measured.

    Where steps of so many decodes are not known, or not any more, a step without prompt rows is a measurement.

    Args:
        max_itl_factor: above 1.
        min_rows: the smallest chunk, whatever it costs, so that prompts advance.
        max_rows: the largest.
    """

    def __init__(self, *, max_itl_factor: float, min_rows: int, max_rows: int) -> None:
        self._max_itl_factor = max_itl_factor
        self._min_rows = min(min_rows, max_rows)
        self._max_rows = max_rows
        self._num_steps = 0
        self._decode_steps: dict[int, deque[float]] = {}  # by bit length of the number of decodes
        self._measured_at: dict[int, int] = {}  # likewise: the number of the last such step
        self._prefill_steps: deque[tuple[int, int, float]] = deque(maxlen=NUM_SAMPLES)

    def num_rows(self, num_decodes: int) -> int:
        """How many prompt rows the next step may have beside `num_decodes` decodes, at least one; 0 to measure."""
        kind = num_decodes.bit_length()
        decode_s = self._decode_s(kind)
        if decode_s is None or self._num_steps - self._measured_at[kind] >= PROBE_INTERVAL:
            return 0
        usual_s = {kind: self._decode_s(kind) for kind in self._decode_steps}
        known = [
            (num_rows, step_s - usual)
            for step_kind, num_rows, step_s in self._prefill_steps
            if (usual := usual_s.get(step_kind)) is not None
        ]
        if not known:
            return self._min_rows
        largest = max(num_rows for num_rows, _ in known[-NUM_LATEST:])
        row_s = _slope([point for point in known if MAX_GROWTH * point[0] >= largest])
        allowed_s = (self._max_itl_factor - 1) * decode_s
        num_rows = allowed_s / row_s if row_s > 0 else math.inf
        return max(self._min_rows, int(min(num_rows, MAX_GROWTH * largest, self._max_rows)))

    def observe(self, num_decodes: int, num_prefill_rows: int, step_s: float) -> None:
        """Take what a step took; one without decodes tells nothing about their delay."""
        self._num_steps += 1
        if num_decodes == 0:
            return
        kind = num_decodes.bit_length()
        if num_prefill_rows == 0:
            self._decode_steps.setdefault(kind, deque(maxlen=NUM_SAMPLES)).append(step_s)
            self._measured_at[kind] = self._num_steps
        elif num_prefill_rows >= self._min_rows:
            self._prefill_steps.append((kind, num_prefill_rows, step_s))

    def _decode_s(self, kind: int) -> float | None:
        """Median time of a step without prompt rows; None if too few of the kind are known."""
        steps = self._decode_steps.get(kind, ())
        return statistics.median(steps) if len(steps) >= MIN_DECODE_SAMPLES else None


def _slope(points: list[tuple[int, float]]) -> float:
    """The slope of the line through the origin with the smallest sum of absolute errors; every x is above 0."""
    slopes = sorted((y / x, x) for x, y in points)
    half = sum(x for x, _ in points) / 2
    sums = itertools.accumulate(x for _, x in slopes)
    return next(slope for (slope, _), total in zip(slopes, sums, strict=True) if total >= half)
