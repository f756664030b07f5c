"""Prefetching stays on exactly where it made steps shorter."""

from hypothesis import given
from hypothesis import strategies as st

from actors.prefetch_trial import NUM_SAMPLES, NUM_STEPS_BETWEEN, PrefetchTrial


def run(
    trial: PrefetchTrial, num_steps: int, num_rows: int, gain_s: float, drift_s: float = 0.0
) -> list[bool]:
    """Steps of 10 ms, shorter by `gain_s` with prefetching, and longer by `drift_s` from one to the next."""
    choices = []
    for step in range(num_steps):
        choices.append(trial.begin(num_rows))
        trial.end(num_rows, 0.010 + drift_s * step - gain_s * choices[-1])
    return choices


@given(st.booleans(), st.floats(0.0005, 0.005), st.floats(-1e-4, 1e-4))
def test_after_a_trial_of_both_the_faster_one_is_kept(pays, size_s, drift_s):
    gain_s = size_s if pays else -size_s
    trial = PrefetchTrial()
    tried = run(trial, 2 * NUM_SAMPLES, 6, gain_s, drift_s)
    assert tried.count(True) == tried.count(False) == NUM_SAMPLES
    assert set(run(trial, NUM_STEPS_BETWEEN - 1, 6, gain_s)) == {pays}


def test_a_decision_is_looked_at_again_and_can_change():
    trial = PrefetchTrial()
    run(trial, 2 * NUM_SAMPLES, 6, 0.001)
    assert all(run(trial, NUM_STEPS_BETWEEN - 1, 6, 0.001))
    run(trial, 2 * NUM_SAMPLES, 6, -0.001)
    assert not any(run(trial, NUM_STEPS_BETWEEN - 1, 6, -0.001))


def test_steps_of_different_sizes_are_decided_apart():
    trial = PrefetchTrial()
    run(trial, 2 * NUM_SAMPLES, 6, 0.001)
    run(trial, 2 * NUM_SAMPLES, 48, -0.001)
    assert (trial.begin(6), trial.begin(48)) == (True, False)


def test_a_step_that_was_not_timed_is_tried_again():
    trial = PrefetchTrial()
    assert [trial.begin(6) for _ in range(3)] == [True] * 3
