"""What the best configuration gives on the published machine, and what is lost without each lever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from placement.replay import Arm
from placement.study import OWN_DENSE_MS, Calibration, Study
from placement.throughput import Engine
from placement.trace_generator import ROWS_PER_SEQUENCE
from placement.validation import calibrated
from placement.workloads import WORKLOADS

BEST_ARM: Final = Arm("adaptive", ep_size=1, use_prefetch=True)
_DRAFTS_OR_NOT: Final = (ROWS_PER_SEQUENCE, 1)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Output tokens a second of every workload, by its name, in one configuration."""

    configuration: str
    tokens_per_s: dict[str, float]


def own_engine() -> Engine:
    """This engine with the step that it aims at; every lever in use. Assumptions, none of them measured yet."""
    return Engine(OWN_DENSE_MS.value, overlaps=True, stages=True, wide_rows=_DRAFTS_OR_NOT)


def levers_only(calibration: Calibration) -> Engine:
    """The published engine's own step, with every lever on what crosses the links."""
    return replace(calibrated(own_engine(), calibration), overlaps=False)


def predict(study: Study, calibration: Calibration, engine: Engine, arm: Arm, name: str) -> Prediction:
    """All workloads in one configuration, each at its published budget."""
    return Prediction(
        name,
        {
            row.name: study.tokens_per_s(row, replace(arm, offload_gib=row.offload_gib), engine, calibration)
            for row in WORKLOADS
        },
    )


def predictions(study: Study, calibration: Calibration) -> Iterator[Prediction]:
    """Both engines at their best, then this engine without one lever after the other."""
    best, engine = BEST_ARM, own_engine()
    yield predict(study, calibration, engine, best, "best")
    for name, other_engine, arm in (
        ("published engine's step, all levers on links", levers_only(calibration), best),
        ("best, whole experts instead of slices", engine, replace(best, ep_size=8)),
        ("best, static plan without adaptation", engine, replace(best, name="static")),
        ("best, whole layers cold, no plan", engine, replace(best, name="layer_offload")),
        ("best, no prefetch", engine, replace(best, use_prefetch=False)),
        ("best, no staging of wide steps", replace(engine, stages=False), best),
        ("best, exact prefill, no bounded replay", replace(engine, replays=False), best),
        ("best, hot reads then cold", replace(engine, overlaps=False), best),
    ):
        yield predict(study, calibration, other_engine, arm, name)
