from dataclasses import replace

import numpy as np
import pytest

from placement.constants import PUBLISHED_MACHINE
from placement.replay import Arm
from placement.throughput import (
    Engine,
    StepCurve,
    curve_traces,
    interactive_tokens_per_s,
    tokens_per_step_of,
    wide_tokens_per_s,
)
from placement.trace_generator import FOUR_DOMAINS, NUM_EXPERTS, NUM_LAYERS, RoutingModel
from placement.workloads import workload

ENGINE = Engine(dense_ms=15.0)
PROFILE = np.arange(NUM_LAYERS * NUM_EXPERTS).reshape(NUM_LAYERS, NUM_EXPERTS)[:, ::-1] % 97


TRACES = curve_traces(RoutingModel(), FOUR_DOMAINS, 64)


def create_curve(offload_gib: float = 12.0) -> StepCurve:
    return StepCurve(TRACES, PROFILE, Arm("static", 1, offload_gib), PUBLISHED_MACHINE)


CURVE = create_curve()


def test_prompts_stop_all_decoding():
    row = replace(workload("C8"), num_requests=2, output_tokens=100)
    # Two prompts of 0.5 s, and 25 steps of 40 ms: 200 tokens in 2 s.
    assert interactive_tokens_per_s(row, 40.0, 500.0, 4.0) == pytest.approx(100.0)


def test_tokens_per_step_is_the_inverse():
    row = workload("C8")
    tokens_per_s = interactive_tokens_per_s(row, 80.0, 300.0, 3.3)
    assert tokens_per_step_of(row, 80.0, 300.0, tokens_per_s) == pytest.approx(3.3)


def test_more_rows_are_never_faster():
    for engine in (ENGINE, replace(ENGINE, stages=True), replace(ENGINE, overlaps=True, row_ms=0.1)):
        times = [CURVE.step_ms(engine, rows, 0, 0) for rows in (6, 48, 200, 900, 2000)]
        assert times == sorted(times)


def test_staging_overlap_and_replay_are_never_slower():
    for rows in (6, 100, 2048):
        slow = CURVE.step_ms(ENGINE, 6, rows, rows)
        assert CURVE.step_ms(replace(ENGINE, stages=True), 6, rows, rows) <= slow
        assert CURVE.step_ms(replace(ENGINE, overlaps=True), 6, rows, rows) <= slow
        assert CURVE.step_ms(ENGINE, 6, rows, min(rows, 128)) <= slow
    assert CURVE.prefill_ms(ENGINE, 5000) < CURVE.prefill_ms(replace(ENGINE, replays=False), 5000)


def test_staging_hides_copies_behind_computation():
    engine = Engine(dense_ms=2000.0, stages=True)
    resident = create_curve(offload_gib=0.0)
    assert CURVE.step_ms(engine, 2048, 0, 0) == pytest.approx(resident.step_ms(engine, 2048, 0, 0))


def test_a_long_prompt_takes_a_step_for_every_chunk():
    chunks = [CURVE.step_ms(ENGINE, 0, rows, 128) for rows in (2048, 2048, 904)]
    assert CURVE.prefill_ms(ENGINE, 5000) == pytest.approx(sum(chunks))


def test_rows_of_prompts_are_charged_or_not():
    charged = replace(ENGINE, row_ms=1.0)
    spared = replace(charged, charges_prompts=False)
    extra = charged.rest_ms(PUBLISHED_MACHINE, 6, 100) - spared.rest_ms(PUBLISHED_MACHINE, 6, 100)
    assert extra == pytest.approx(100.0)


def test_a_batch_of_one_request_is_its_prompt_and_its_steps():
    row = replace(workload("C128"), num_requests=1, output_tokens=40)
    total_ms = CURVE.step_ms(ENGINE, 0, 1000, 128) + 10 * CURVE.step_ms(ENGINE, 6, 0, 0)
    assert wide_tokens_per_s(row, ENGINE, CURVE, [4.0]) == pytest.approx(40 / total_ms * 1e3)


def test_a_wide_batch_drafts_only_if_that_is_faster():
    row = workload("C128")
    with_drafts = wide_tokens_per_s(row, ENGINE, CURVE, [4.0])
    without = wide_tokens_per_s(row, replace(ENGINE, wide_rows=(1,)), CURVE, [1.0])
    either = wide_tokens_per_s(row, replace(ENGINE, wide_rows=(6, 1)), CURVE, [4.0, 1.0])
    assert either == max(with_drafts, without)
