"""Study: the published workloads under an arm and an engine, with what the layer-offload rows calibrate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placement.constants import NUM_RANKS, PUBLISHED_MACHINE, Constant, Machine
from placement.cost_model import hot_ms
from placement.hot_mask import whole_layers_cold
from placement.replay import Arm, Replay, read_loads, replay
from placement.throughput import (
    PROMPT_PASSAGE_TOKENS,
    Engine,
    StepCurve,
    curve_traces,
    interactive_tokens_per_s,
    prompt_traffic,
    tokens_per_step_of,
    wide_tokens_per_s,
)
from placement.trace import Trace
from placement.trace_generator import FOUR_DOMAINS, ROWS_PER_SEQUENCE, RoutingModel, Traffic
from placement.workloads import Workload, workload

SETTLING_TOKENS: Final = 2000
"""After so many an adaptive hot set is judged."""
MEASURED_STEPS: Final = 600
_TYPICAL_TOKENS_PER_STEP: Final = 4
_MAX_ROW_MS: Final = 2.0
_NUM_BISECTIONS: Final = 30
OWN_DENSE_MS: Final = Constant(
    6.0,
    "ms",
    "aim",
    "what issue 6 allows a step of six rows on one H200 without collectives, routed products included; here for "
    "the rest of the step on a GPU with less than half the memory bandwidth. Not measured",
)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted to the layer-offload rows and the documented breakdown, and to nothing else."""

    dense_ms: float
    row_ms: float
    tokens_per_step: dict[str, float]
    """By workload; a wide batch takes that of the interactive workload with its kind of text."""


class Study:
    """Traces, profiles and curves of one seed, made when they are needed."""

    def __init__(self, seed: int = 0, machine: Machine = PUBLISHED_MACHINE) -> None:
        self.model = RoutingModel(seed)
        self.machine = machine
        self._profiles: dict[Traffic, NDArray[np.int64]] = {}
        self._traces: dict[tuple[str, bool], Trace] = {}
        self._curve_traces: dict[tuple[Traffic, int], tuple[Trace, ...]] = {}
        self._curves: dict[tuple[Traffic, int, Arm], StepCurve] = {}
        self._expert_ms: dict[tuple[str, Arm, bool], float] = {}

    def profile(self, traffic: Traffic) -> NDArray[np.int64]:
        """Routed slots of 19,200 rows of the traffic; no step that is replayed is among them."""
        if traffic not in self._profiles:
            trace = self.model.generate(traffic, 200, num_sequences=16, seed=1000)
            self._profiles[traffic] = trace.routed_slots()
        return self._profiles[traffic]

    def trace(self, row: Workload, *, with_predictions: bool = False) -> Trace:
        """Decode steps of an interactive workload, enough to settle and then to measure."""
        if (row.name, True) in self._traces:
            return self._traces[row.name, True]
        key = (row.name, with_predictions)
        if key not in self._traces:
            num_steps = self.settling_steps(row) + MEASURED_STEPS
            self._traces[key] = self.model.generate(
                row.traffic,
                num_steps,
                num_sequences=row.num_contexts,
                rows_per_sequence=ROWS_PER_SEQUENCE * row.num_requests // row.num_contexts,
                with_predictions=with_predictions,
                seed=2000 + row.num_requests,
            )
        return self._traces[key]

    def settling_steps(self, row: Workload) -> int:
        """Steps that `SETTLING_TOKENS` take."""
        return -(-SETTLING_TOKENS // (_TYPICAL_TOKENS_PER_STEP * row.num_requests))

    def replay(self, row: Workload, arm: Arm, engine: Engine) -> Replay:
        """The decode steps of an interactive workload, with the four-domain profile."""
        trace = self.trace(row, with_predictions=arm.use_prefetch)
        profile = self.profile(FOUR_DOMAINS)
        rest_ms = engine.rest_ms(self.machine, trace.num_rows, 0)
        return replay(trace, arm, profile, self.machine, rest_ms, overlaps=engine.overlaps)

    def step_ms(self, row: Workload, arm: Arm, engine: Engine) -> float:
        """A settled decode step of an interactive workload."""
        settled = slice(self.settling_steps(row), None)
        if arm.name == "adaptive" or arm.use_prefetch:
            return float(self.replay(row, arm, engine).cost.step_ms[settled].mean())
        # The rest of the step decides neither what is hot nor what is read when.
        key = (row.name, arm, engine.overlaps)
        if key not in self._expert_ms:
            self._expert_ms[key] = float(self.replay(row, arm, engine).cost.expert_ms[settled].mean())
        rest_ms = engine.rest_ms(self.machine, row.num_requests * ROWS_PER_SEQUENCE, 0)
        return self._expert_ms[key] + rest_ms

    def prefill_ms(self, row: Workload, arm: Arm, engine: Engine) -> float:
        """One prompt of an interactive workload."""
        curve = self._curve(prompt_traffic(row), row.traffic, PROMPT_PASSAGE_TOKENS, arm)
        return curve.prefill_ms(engine, row.prompt_tokens)

    def tokens_per_s(self, row: Workload, arm: Arm, engine: Engine, calibration: Calibration) -> float:
        """Output tokens a second."""
        tokens_per_step = calibration.tokens_per_step[row.name]
        if row.is_wide:
            curve = self._curve(row.traffic, row.traffic, ROWS_PER_SEQUENCE, arm)
            tokens = [tokens_per_step if rows > 1 else 1.0 for rows in engine.wide_rows]
            return wide_tokens_per_s(row, engine, curve, tokens)
        step_ms, prefill_ms = self.step_ms(row, arm, engine), self.prefill_ms(row, arm, engine)
        return interactive_tokens_per_s(row, step_ms, prefill_ms, tokens_per_step)

    def calibrate(self, engine: Engine) -> Calibration:
        """Fit the published engine to its layer-offload rows.

        The documented breakdown gives the base time. C1 and C8 together give the tokens that a step brings each
        request and what a further row costs; the row of random tokens gives the tokens of its kind of text.

        Args:
            engine: the published one; what is fitted of it is not used.
        """
        one, eight, random = workload("C1"), workload("C8"), workload("random")
        low, high = 0.0, _MAX_ROW_MS
        for _ in range(_NUM_BISECTIONS):
            engine = replace(engine, dense_ms=self.published_dense_ms, row_ms=(low + high) / 2)
            tokens_per_step = self._tokens_per_step(one, engine)
            is_too_fast = self._tokens_per_step(eight, engine) < tokens_per_step
            low, high = (engine.row_ms, high) if is_too_fast else (low, engine.row_ms)
        random_tokens = self._tokens_per_step(random, engine)
        tokens = dict.fromkeys(("C1", "C8", "C128"), tokens_per_step)
        return Calibration(
            engine.dense_ms, engine.row_ms, tokens | dict.fromkeys(("random", "C256"), random_tokens)
        )

    def _tokens_per_step(self, row: Workload, engine: Engine) -> float:
        """At which the layer-offload row comes out."""
        assert row.published_layer_offload is not None
        arm = Arm("layer_offload", NUM_RANKS, row.offload_gib)
        step_ms, prefill_ms = self.step_ms(row, arm, engine), self.prefill_ms(row, arm, engine)
        return tokens_per_step_of(row, step_ms, prefill_ms, row.published_layer_offload)

    @cached_property
    def published_dense_ms(self) -> float:
        """The documented time outside offloaded experts and collectives, less the products of resident experts."""
        arm, row = Arm("layer_offload"), workload("C1")
        loads, _ = read_loads(
            self.trace(row), slice(0, MEASURED_STEPS), whole_layers_cold(arm.offload_gib), arm
        )
        resident_ms = hot_ms(self.machine, loads.hot, arm.ep_size).sum(axis=1).mean()
        return self.machine.outside_ms.value - float(resident_ms)

    def _curve(self, traffic: Traffic, mix: Traffic, rows_per_sequence: int, arm: Arm) -> StepCurve:
        # Once adapted, a hot set is taken to be the one that a profile of the traffic gives.
        profile = self.profile(mix if arm.name == "adaptive" else FOUR_DOMAINS)
        # Steps with prompts and wide ones touch so much that foreseeing pages decides nothing.
        arm = replace(arm, use_prefetch=False)
        key = (traffic, rows_per_sequence, arm)
        if key not in self._curves:
            if key[:2] not in self._curve_traces:
                self._curve_traces[key[:2]] = curve_traces(self.model, traffic, rows_per_sequence)
            self._curves[key] = StepCurve(self._curve_traces[key[:2]], profile, arm, self.machine)
        return self._curves[key]


def published_arm(row: Workload, *, is_placed: bool, placed_gib: float | None = None) -> Arm:
    """What the published campaign ran, with the placed arm at its workload's budget unless another one is given."""
    if not is_placed:
        return Arm("layer_offload", NUM_RANKS, row.offload_gib)
    return Arm("static", NUM_RANKS, row.offload_gib if placed_gib is None else placed_gib)
