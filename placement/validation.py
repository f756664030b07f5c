"""Published against simulated: fitted to layer-offload rows and the documented breakdown, the rest is held out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from placement.study import Calibration, Study, published_arm
from placement.throughput import Engine
from placement.workloads import WIDE_OFFLOAD_GIB, WORKLOADS

MAX_ERROR: Final = 0.10
"""Of a held-out row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure and what the model says."""

    name: str
    arm: str
    published: float
    simulated: float
    is_held_out: bool

    @property
    def error(self) -> float:
        """Relative; positive if the model is too fast."""
        return self.simulated / self.published - 1

    @property
    def fails(self) -> bool:
        """Whether the model does not predict this row."""
        return self.is_held_out and not abs(self.error) <= MAX_ERROR


@dataclass(frozen=True, slots=True)
class Approach:
    """A way to model what is not documented of the published engine."""

    name: str
    engine: Engine
    placed_gib: float | None = None
    """Offloaded by the placed arm; None: as much as layer offload moves."""


_PUBLISHED_ENGINE: Final = Engine(dense_ms=0.0)
APPROACHES: Final = (
    Approach(
        "every row costs the same, staged copies hide nothing, wide batches use drafts", _PUBLISHED_ENGINE
    ),
    Approach("the same, but wide batches without drafts", replace(_PUBLISHED_ENGINE, wide_rows=(1,))),
    Approach(
        "the same, but prompt rows cost nothing extra", replace(_PUBLISHED_ENGINE, charges_prompts=False)
    ),
    Approach(
        "the same, but staged copies hide behind everything else", replace(_PUBLISHED_ENGINE, stages=True)
    ),
    Approach(
        "the same, but the placed arm always offloads 12 GiB, to make room for staging",
        _PUBLISHED_ENGINE,
        WIDE_OFFLOAD_GIB,
    ),
    Approach("the same, but hot and cold reads overlap", replace(_PUBLISHED_ENGINE, overlaps=True)),
)
"""The first one decides. The others differ from it in what nobody published and no layer-offload row tells apart.

NOTE: these choices, what random tokens are about (every topic alike) and how alike eight requests are (three
passages, for the documented 90 ms) were made with the held-out figures in view; the fit itself never reads them. Read
the first one's errors as how well physics with these choices explains the table, not as a blind forecast.
"""


def validate(study: Study, approach: Approach = APPROACHES[0]) -> tuple[Calibration, list[Row]]:
    """Fit to the layer-offload rows, then predict every row of the table."""
    calibration = study.calibrate(baseline(approach.engine))
    placed = calibrated(approach.engine, calibration)
    rows = []
    for row in WORKLOADS:
        for is_placed, published in ((False, row.published_layer_offload), (True, row.published_placed)):
            if published is not None:
                engine = placed if is_placed else baseline(placed)
                arm = published_arm(row, is_placed=is_placed, placed_gib=approach.placed_gib)
                simulated = study.tokens_per_s(row, arm, engine, calibration)
                rows.append(Row(row.name, arm.name, published, simulated, is_placed))
    return calibration, rows


def baseline(engine: Engine) -> Engine:
    """The same engine with layer offload, which reads weights in place and never stages them."""
    return replace(engine, stages=False)


def calibrated(engine: Engine, calibration: Calibration) -> Engine:
    """The published engine as it was fitted."""
    return replace(engine, dense_ms=calibration.dense_ms, row_ms=calibration.row_ms)


def breakdown(study: Study, calibration: Calibration, engine: Engine) -> Iterator[tuple[str, str, float]]:
    """Documented and simulated milliseconds; documented cold times are themselves estimates (design section 5)."""
    engine = calibrated(engine, calibration)
    documented = {
        ("C1", False): "25",
        ("C1", True): "8-11",
        ("C8", False): "90",
        ("C8", True): "32-40",
    }
    for row in WORKLOADS:
        for is_placed in (False, True):
            if (row.name, is_placed) not in documented:
                continue
            cost = study.replay(row, published_arm(row, is_placed=is_placed), engine).cost
            arm = "static" if is_placed else "layer_offload"
            yield (
                f"{row.name} {arm}: waiting for cold pages",
                documented[row.name, is_placed],
                cost.link_ms.mean(),
            )
            if (row.name, is_placed) == ("C1", False):
                yield f"{row.name} {arm}: whole step", "45", cost.step_ms.mean()
