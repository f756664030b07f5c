import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployment.prefill_chunks import MAX_GROWTH, MIN_DECODE_SAMPLES, PROBE_INTERVAL, PrefillChunks

DECODE_S = 0.006


def create(**changes: float) -> PrefillChunks:
    return PrefillChunks(**({"max_itl_factor": 2.0, "min_rows": 64, "max_rows": 8192} | changes))


def run(
    chunks: PrefillChunks,
    step_s: Callable[[int], float],
    num_steps: int,
    num_decodes: int = 4,
    measured: Callable[[float], float] = lambda step_s: step_s,
) -> list[int]:
    """Rows of each step of a prompt without end; `step_s` says what a step with so many rows takes."""
    rows = []
    for _ in range(num_steps):
        rows.append(chunks.num_rows(num_decodes))
        chunks.observe(num_decodes, rows[-1], measured(step_s(rows[-1])))
    return rows


def affine(row_s: float, chunk_s: float = 0.0) -> Callable[[int], float]:
    return lambda num_rows: DECODE_S + (chunk_s + row_s * num_rows if num_rows else 0.0)


def test_steps_without_prompt_rows_are_measured_first_and_chunks_then_grow_from_the_smallest():
    rows = run(create(), affine(1e-6), 20)
    assert rows[: MIN_DECODE_SAMPLES + 4] == [0] * MIN_DECODE_SAMPLES + [64, 128, 256, 512]
    assert rows[-1] == pytest.approx(6000, abs=1)


def test_a_chunk_is_never_larger_than_allowed():
    assert run(create(max_rows=100), affine(1e-9), 20)[-1] == 100
    assert run(create(max_rows=50), affine(1.0), 20)[-1] == 50


def test_chunks_shrink_to_the_smallest_if_no_chunk_meets_the_bound():
    assert run(create(), affine(1e-6, chunk_s=2 * DECODE_S), 30)[-1] == 64


def test_what_steps_without_prompt_rows_take_is_measured_again_after_a_while():
    chunks = create()
    rows = run(chunks, affine(1e-6), MIN_DECODE_SAMPLES + 2 * PROBE_INTERVAL)
    probes = [step for step, num_rows in enumerate(rows) if num_rows == 0]
    assert probes == [*range(MIN_DECODE_SAMPLES), MIN_DECODE_SAMPLES + PROBE_INTERVAL]


def test_another_number_of_decodes_is_measured_by_itself():
    chunks = create()
    run(chunks, affine(1e-6), 30, num_decodes=4)
    assert chunks.num_rows(7) > 0
    assert chunks.num_rows(8) == 0


def test_steps_without_decodes_do_not_count():
    chunks = create()
    run(chunks, affine(1e-6), 30)
    expected = chunks.num_rows(4)
    for _ in range(30):
        chunks.observe(0, 8192, 9.0)
    assert chunks.num_rows(4) == expected


def test_the_short_end_of_a_prompt_does_not_make_the_next_chunks_small():
    chunks = create()
    expected = run(chunks, affine(1e-6, chunk_s=0.002), 60)[-1]
    chunks.observe(4, 70, affine(1e-6, chunk_s=0.002)(70))
    assert chunks.num_rows(4) == pytest.approx(expected, rel=0.02)


def test_a_step_that_waits_for_weights_while_it_computes_few_rows_is_kept_within_the_bound_too():
    def step_s(num_rows: int) -> float:
        return max(DECODE_S, 20e-6 * num_rows)

    rows = run(create(), step_s, 60)
    assert max(map(step_s, rows[20:])) <= 2 * DECODE_S * 1.25
    # On the way, a chunk may be as much too large as chunks grow at once.
    assert max(map(step_s, rows)) <= 2 * DECODE_S * MAX_GROWTH


@settings(max_examples=150, deadline=None)
@given(
    max_itl_factor=st.floats(1.2, 5),
    row_s=st.floats(1e-7, 1e-4),
    chunk_share=st.floats(0, 0.6),
    noise=st.floats(0, 0.05),
    outlier=st.integers(20, 60),
    phase=st.integers(0, 60),
    seed=st.integers(0, 1000),
)
def test_the_chunk_meets_the_bound_and_is_no_smaller_than_that_asks_for(
    max_itl_factor: float, row_s: float, chunk_share: float, noise: float, outlier: int, phase: int, seed: int
):
    """Steps of an affine cost, measured with noise; the first one, and sometimes another, takes ten times as long.

    The bounds: what noise of both medians makes of the allowed time.
    """
    rng = random.Random(seed)
    allowed_s = (max_itl_factor - 1) * DECODE_S
    step_s = affine(row_s, chunk_share * allowed_s)
    number = 0

    def measured(true_s: float) -> float:
        nonlocal number
        is_outlier = number == 0 or (number + phase) % outlier == 0
        number += 1
        return true_s * (1 + rng.uniform(-noise, noise)) * (10 if is_outlier else 1)

    chunks = create(max_itl_factor=max_itl_factor)
    rows = [num_rows for num_rows in run(chunks, step_s, 200, measured=measured)[120:] if num_rows]
    slack_s = 3 * noise * max_itl_factor * DECODE_S + row_s
    for num_rows in rows:
        assert num_rows == 64 or step_s(num_rows) <= max_itl_factor * DECODE_S + slack_s
    ideal = (1 - chunk_share) * allowed_s / row_s
    typical = sorted(rows)[len(rows) // 2]
    floor = ideal - 3 * slack_s / ((1 - chunk_share) * row_s)
    assert typical >= min(8192, floor * 0.95)
