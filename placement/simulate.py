"""Simulate eight ranks over routing traces.

    python -m placement.simulate [--workload C1] [--arm adaptive] [--ep-size 1] [--offload-gib 9.75] [--prefetch]
    python -m placement.simulate --trace FILE          replay a recorded trace instead
    python -m placement.simulate --save-trace FILE     write the generated trace of one workload
    python -m placement.simulate --validate            published against simulated; fails if a held-out row is off
    python -m placement.simulate --predict             the best configuration, and what each lever carries

`--json` prints the same as JSON. An option that is left out takes all its values.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, get_args

from placement.constants import NUM_EXPERTS, NUM_LAYERS
from placement.hot_mask import num_hot_pages
from placement.prediction import predictions
from placement.replay import Arm, ArmName, Replay, replay
from placement.study import OWN_DENSE_MS, Study
from placement.throughput import Engine, interactive_tokens_per_s
from placement.trace import Trace, TraceError, load, save
from placement.trace_generator import FOUR_DOMAINS
from placement.validation import APPROACHES, MAX_ERROR, breakdown, calibrated, validate
from placement.workloads import INTERACTIVE_OFFLOAD_GIB, WIDE_OFFLOAD_GIB, WORKLOADS, Workload, workload

Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = _parser().parse_args(arguments)
    study = Study(options.seed)
    try:
        for gib in options.offload_gib:
            num_hot_pages(gib, 1)
        if options.validate:
            records, failed = _validate(study)
        elif options.predict:
            records, failed = list(_predict(study)), False
        elif options.save_trace:
            save(study.trace(workload(options.workload[0]), with_predictions=True), options.save_trace)
            return
        else:
            records, failed = list(_simulate(study, options)), False
    except (TraceError, ValueError) as error:
        sys.exit(f"placement.simulate: {error}")
    lines = [json.dumps(record) for record in records] if options.json else _as_table(records)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    if failed:
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--validate", action="store_true")
    mode.add_argument("--predict", action="store_true")
    mode.add_argument("--trace", type=Path)
    mode.add_argument("--save-trace", type=Path)
    names = [row.name for row in WORKLOADS]
    parser.add_argument("--workload", nargs="+", choices=names, default=names)
    parser.add_argument("--arm", nargs="+", choices=get_args(ArmName), default=get_args(ArmName))
    parser.add_argument("--ep-size", nargs="+", type=int, choices=(1, 2, 4, 8), default=(8, 1))
    budgets = (INTERACTIVE_OFFLOAD_GIB, WIDE_OFFLOAD_GIB)
    parser.add_argument("--offload-gib", nargs="+", type=float, default=budgets, help="of each rank")
    parser.add_argument("--prefetch", nargs="+", choices=("off", "on"), default=("off",))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one object a line")
    return parser


def _simulate(study: Study, options: argparse.Namespace) -> Iterator[Record]:
    trace = _load_full_size(options.trace) if options.trace else None
    calibration = study.calibrate(APPROACHES[0].engine)
    engine = calibrated(APPROACHES[0].engine, calibration)
    arms = [
        Arm(name, ep_size, gib, use_prefetch=prefetch == "on")
        for name, ep_size, gib, prefetch in product(
            options.arm, options.ep_size, options.offload_gib, options.prefetch
        )
    ]
    if trace is not None:
        for arm in arms:
            rest_ms = engine.rest_ms(study.machine, trace.num_rows, 0)
            result = replay(trace, arm, study.profile(FOUR_DOMAINS), study.machine, rest_ms)
            yield _record(trace.label, arm, result, 0)
        return
    for name, arm in product(options.workload, arms):
        row = workload(name)
        if row.is_wide:
            tokens_per_s = study.tokens_per_s(row, arm, engine, calibration)
            yield _arm_record(name, arm) | {"tokens_per_s": round(tokens_per_s, 2)}
            continue
        result = study.replay(row, arm, engine)
        record = _record(name, arm, result, study.settling_steps(row))
        yield record | {
            "tokens_per_s": _tokens_per_s(study, row, arm, engine, calibration.tokens_per_step, record)
        }


def _tokens_per_s(
    study: Study, row: Workload, arm: Arm, engine: Engine, tokens_per_step: dict[str, float], record: Record
) -> float:
    prefill_ms = study.prefill_ms(row, arm, engine)
    return round(interactive_tokens_per_s(row, record["step_ms"], prefill_ms, tokens_per_step[row.name]), 2)


def _load_full_size(path: Path) -> Trace:
    trace = load(path)
    if (trace.num_layers, trace.num_experts) != (NUM_LAYERS, NUM_EXPERTS):
        raise TraceError(
            f"{path}: the cost model knows {NUM_LAYERS} layers of {NUM_EXPERTS} experts, the trace has "
            f"{trace.num_layers} of {trace.num_experts}"
        )
    return trace


def _arm_record(name: str, arm: Arm) -> Record:
    return {
        "workload": name,
        "arm": arm.name,
        "ep_size": arm.ep_size,
        "offload_gib": arm.offload_gib,
        "prefetch": arm.use_prefetch,
    }


def _record(name: str, arm: Arm, result: Replay, first: int) -> Record:
    """Means over the steps from `first` on."""
    cost = result.cost
    return _arm_record(name, arm) | {
        "hit_rate": round(float(result.hit_rate[first:].mean()), 4),
        "step_ms": round(float(cost.step_ms[first:].mean()), 3),
        "link_ms": round(float(cost.link_ms[first:].mean()), 3),
        "hbm_mb": round(float(cost.hot_bytes[first:].mean()) / 1e6, 1),
        "link_mb": round(float(cost.link_bytes[first:].mean()) / 1e6, 1),
        "busiest_rank_mb": round(float(cost.busiest_bytes[first:].mean()) / 1e6, 1),
        "swapped_mb": round(float(result.swapped_bytes[first:].mean()) / 1e6, 2),
    }


def _validate(study: Study) -> tuple[list[Record], bool]:
    records: list[Record] = []
    for number, approach in enumerate(APPROACHES):
        calibration, rows = validate(study, approach)
        records += [
            {
                "approach": approach.name,
                "workload": row.name,
                "arm": row.arm,
                "role": "held out" if row.is_held_out else "calibrates",
                "published": row.published,
                "simulated": round(row.simulated, 2),
                "error": f"{row.error:+.1%}",
                "verdict": f"off by more than {MAX_ERROR:.0%}" if row.fails else "",
            }
            for row in rows
        ]
        if number == 0:
            failed = any(row.fails for row in rows)
            records += [{"fitted": name, "value": value} for name, value in asdict(calibration).items()]
            for what, documented, simulated in breakdown(study, calibration, approach.engine):
                records.append({"ms of": what, "documented": documented, "simulated": round(simulated, 1)})
    return records, failed


def _predict(study: Study) -> Iterator[Record]:
    calibration = study.calibrate(APPROACHES[0].engine)
    yield {"configuration": "published: layer offload"} | {
        row.name: row.published_layer_offload for row in WORKLOADS
    }
    yield {"configuration": "published: placed"} | {row.name: row.published_placed for row in WORKLOADS}
    yield {"configuration": "aim"} | {row.name: row.aim for row in WORKLOADS}
    for prediction in predictions(study, calibration):
        figures = {name: round(float(figure), 1) for name, figure in prediction.tokens_per_s.items()}
        yield {"configuration": prediction.configuration} | figures
    for row in WORKLOADS:
        yield {"workload": row.name, "assumptions": row.assumptions}
    for name, constant in (study.machine.constants() | {"own_dense_ms": OWN_DENSE_MS}).items():
        yield {"constant": name} | asdict(constant)


def _as_table(records: Iterable[Record]) -> Iterator[str]:
    """Records of the same fields under one heading, an approach's name above its records."""
    groups: list[list[Record]] = []
    for record in records:
        if (
            groups
            and groups[-1][0].keys() == record.keys()
            and (groups[-1][0].get("approach") == record.get("approach"))
        ):
            groups[-1].append(record)
        else:
            groups.append([record])
    for group in groups:
        if "approach" in group[0]:
            yield group[0]["approach"]
        names = [name for name in group[0] if name != "approach"]
        cells = [names] + [[_cell(record[name]) for name in names] for record in group]
        widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
        for row in cells:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        yield ""


def _cell(value: object) -> str:
    return "" if value is None else str(value)


if __name__ == "__main__":
    main()
