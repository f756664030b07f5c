"""How much does a hot set save, and what becomes of it when the traffic changes? Draws `benchmarks/figures/*.svg`.

    python -m benchmarks.placement_figures [--out FOLDER]

Simulated: generated traces, the published machine, the published engine's step (`placement/validation.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.svg_chart import Line, chart
from placement.replay import Arm, ArmName, replay
from placement.study import Study
from placement.throughput import Engine
from placement.trace import Trace
from placement.trace_generator import FOUR_DOMAINS, RANDOM_TOKENS, single_topic
from placement.validation import APPROACHES, calibrated
from placement.workloads import workload

EP_SIZES = (1, 2, 4, 8)
ARMS: tuple[ArmName, ...] = ("layer_offload", "static", "adaptive")
SWITCH_STEP = 250
TOKENS_PER_STEP = 4
SMOOTHING_STEPS = 25


def main() -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    study = Study()
    engine = calibrated(APPROACHES[0].engine, study.calibrate(APPROACHES[0].engine))
    for name, svg in figures(study, engine):
        path = folder / f"{name}.svg"
        path.write_text(svg)
        print(path)


def figures(study: Study, engine: Engine) -> Iterator[tuple[str, str]]:
    """Names and contents."""
    yield "hit_rate_by_residency", hit_rates(study)
    yield "step_by_ep_size_1_request", steps_by_ep_size(study, engine, "C1")
    yield "step_by_ep_size_8_requests", steps_by_ep_size(study, engine, "C8")
    yield "random_tokens", random_tokens(study, engine)


def hit_rates(study: Study) -> str:
    """Coding traffic served by hot sets that were made for it, for a mix that contains it, and for another domain."""
    traffic = study.model.generate(single_topic(0), 128, num_sequences=16, seed=3).routed_slots()
    shares = np.linspace(0.3, 1.0, 29)
    lines = []
    for name, made_for in (
        ("matching: coding", single_topic(0)),
        ("mixed: four domains", FOUR_DOMAINS),
        ("wrong: translation", single_topic(3)),
    ):
        order = np.argsort(-study.profile(made_for).ravel(), kind="stable")
        hits = np.cumsum(traffic.ravel()[order]) / traffic.sum()
        points = [(100 * share, 100 * float(hits[round(share * len(hits)) - 1])) for share in shares]
        lines.append(Line(name, points))
    lines.append(Line("no knowledge", [(30.0, 30.0), (100.0, 100.0)], is_dashed=True))
    return chart(
        "Hit rate on coding text (simulated)", "resident experts, %", "routed slots that hit, %", lines
    )


def steps_by_ep_size(study: Study, engine: Engine, name: str) -> str:
    """Settled decode steps of a workload in every layout."""
    row = workload(name)
    lines = [
        Line(
            arm,
            [
                (float(ep_size), study.step_ms(row, Arm(arm, ep_size, row.offload_gib), engine))
                for ep_size in EP_SIZES
            ],
        )
        for arm in ARMS
    ]
    return chart(f"Decode step, {row.title} (simulated)", "ep_size", "ms", lines)


def random_tokens(study: Study, engine: Engine) -> str:
    """Text that the profile fits, then random tokens."""
    text, noise = (
        study.model.generate(traffic, num_steps, seed=5)
        for traffic, num_steps in ((FOUR_DOMAINS, SWITCH_STEP), (RANDOM_TOKENS, 750))
    )
    ids = np.concatenate([text.topk_idx, noise.topk_idx])
    trace = Trace("text, then random tokens", text.num_experts, ids)
    rest_ms = engine.rest_ms(study.machine, trace.num_rows, 0)
    lines = []
    for arm in (Arm("layer_offload"), Arm("static"), Arm("adaptive"), replace(Arm("adaptive"), ep_size=1)):
        result = replay(trace, arm, study.profile(FOUR_DOMAINS), study.machine, rest_ms)
        smooth = np.convolve(result.cost.step_ms, np.ones(SMOOTHING_STEPS) / SMOOTHING_STEPS, "valid")
        points = [
            (float((step + SMOOTHING_STEPS - SWITCH_STEP) * TOKENS_PER_STEP), float(smooth[step]))
            for step in range(0, len(smooth), 8)
        ]
        lines.append(Line(f"{arm.name}, ep_size {arm.ep_size}", points))
    return chart(
        "One request: text, then random tokens (simulated)", "tokens since the change", "step, ms", lines
    )


if __name__ == "__main__":
    main()
