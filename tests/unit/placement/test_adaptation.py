import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.adaptation import AdaptationPolicy, AdaptationSettings, _smallest

PAGE_BYTES = 10


def create_policy(experts_per_layer=(4, 4), hot=((0, 1), (0, 1)), prior=None, **changes) -> AdaptationPolicy:
    values = {"half_life_tokens": 100.0, "max_bytes_per_s": 20.0, "max_burst_bytes": 40.0, **changes}
    return AdaptationPolicy(hot, experts_per_layer, PAGE_BYTES, AdaptationSettings(**values), prior)


def counts(*values: int) -> np.ndarray:
    return np.array(values)


@st.composite
def histories(draw):
    """A policy's shape, and what it sees: counts, tokens, seconds."""
    experts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    hot = [sorted(draw(st.sets(st.integers(0, n - 1)))) for n in experts]
    num_pages = sum(experts)
    observation = st.tuples(
        st.lists(st.integers(0, 60), min_size=num_pages, max_size=num_pages).map(np.array),
        st.integers(0, 200),
        st.floats(0, 5),
        st.sampled_from(["run", "run", "run", "pause", "resume"]),
    )
    return experts, hot, draw(st.lists(observation, min_size=1, max_size=12))


@settings(deadline=None)
@given(histories(), st.floats(0, 100), st.floats(0, 100))
def test_every_swap_keeps_the_number_of_hot_pages_and_the_budget(history, max_bytes_per_s, max_burst_bytes):
    experts, hot, observations = history
    policy = create_policy(
        experts, hot, max_bytes_per_s=max_bytes_per_s, max_burst_bytes=max_burst_bytes, min_sigmas=0.0
    )
    pages = {(layer, expert) for layer, row in enumerate(hot) for expert in row}
    num_hot, elapsed_s, spent_bytes = len(pages), 0.0, 0
    for row_counts, num_tokens, seconds, action in observations:
        {"pause": policy.pause, "resume": policy.resume, "run": lambda: None}[action]()
        policy.observe(row_counts, num_tokens)
        swaps = policy.propose(seconds)
        for swap in swaps:
            pages.remove(swap.evict)
            assert swap.admit not in pages
            pages.add(swap.admit)
        policy.check_integrity()
        elapsed_s += seconds
        spent_bytes += len(swaps) * PAGE_BYTES
        assert len(swaps) * PAGE_BYTES <= max_burst_bytes
        assert spent_bytes <= max_bytes_per_s * elapsed_s + 1e-9
        assert not (policy.state().is_paused and swaps)
        assert len(pages) == num_hot == policy.state().num_hot
        assert {(layer, e) for layer, row in enumerate(policy.hot_experts()) for e in row} == pages
    assert policy.state().swapped_bytes == spent_bytes


@settings(deadline=None)
@given(histories())
def test_two_policies_that_see_the_same_decide_the_same(history):
    experts, hot, observations = history
    first, second = create_policy(experts, hot), create_policy(experts, hot)
    for row_counts, num_tokens, seconds, _ in observations:
        for policy in (first, second):
            policy.observe(row_counts, num_tokens)
        assert first.propose(seconds) == second.propose(seconds)
    assert first.state() == second.state()


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=8, max_size=8).map(np.array), st.integers(1, 100))
def test_traffic_that_stays_the_same_brings_no_page_in_twice(row_counts, num_tokens):
    policy = create_policy()
    admitted = []
    for _ in range(30):
        policy.observe(row_counts, num_tokens)
        admitted += [swap.admit for swap in policy.propose(1.0)]
    assert len(admitted) == len(set(admitted)) <= policy.state().num_hot
    policy.observe(row_counts, num_tokens)
    assert policy.propose(10.0) == ()


def test_random_draws_from_one_distribution_hardly_move_a_fitting_hot_set():
    rng = np.random.default_rng(0)
    rates = np.sort(rng.lognormal(sigma=1.0, size=200))[::-1]
    policy = create_policy(
        (200,), (tuple(range(140)),), half_life_tokens=600.0, max_bytes_per_s=1e9, max_burst_bytes=1e9
    )
    swaps = 0
    for _ in range(400):
        policy.observe(rng.poisson(rates), 6)
        swaps += len(policy.propose(1.0))
    assert swaps < 200  # Of 56,000 that could have been.
    assert set(policy.hot_experts()[0]) >= set(range(90))


def test_a_page_that_becomes_busy_replaces_the_one_that_is_used_least():
    policy = create_policy()
    policy.observe(counts(9, 5, 0, 30, 9, 9, 0, 0), 10)
    (swap,) = policy.propose(10.0)
    assert (swap.evict, swap.admit) == ((0, 1), (0, 3))


def test_a_slot_may_move_to_another_layer():
    policy = create_policy()
    policy.observe(counts(20, 1, 0, 0, 20, 20, 20, 0), 10)
    (swap,) = policy.propose(10.0)
    assert (swap.evict, swap.admit) == ((0, 1), (1, 2))


def test_what_chance_explains_moves_nothing():
    policy = create_policy()
    policy.observe(counts(10, 10, 12, 0, 10, 10, 12, 0), 10)
    assert policy.propose(10.0) == ()


def test_the_profile_outweighs_a_few_tokens_until_it_has_faded():
    policy = create_policy(prior=np.array([50.0, 50, 0, 0, 50, 50, 0, 0]))
    seen = counts(0, 0, 6, 6, 0, 0, 6, 6)
    policy.observe(seen, 10)
    assert policy.propose(1.0) == ()
    for _ in range(30):
        policy.observe(seen, 10)
        policy.propose(1.0)
    assert policy.hot_experts() == ((2, 3), (2, 3))


def test_a_paused_policy_goes_on_counting():
    policy = create_policy()
    policy.pause()
    policy.observe(counts(0, 0, 30, 0, 9, 9, 0, 0), 10)
    assert policy.propose(10.0) == ()
    assert policy.state().hit_rate == 18 / 48
    policy.resume()
    assert len(policy.propose(0.0)) == 1


def test_before_anything_is_routed_there_is_no_hit_rate():
    assert create_policy().state().hit_rate is None


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: create_policy(hot=((0, 0), (1,))), "different experts"),
        (lambda: create_policy(hot=((4,), (1,))), "below 4"),
        (lambda: create_policy(hot=((0,),)), "1 layers"),
        (lambda: create_policy(half_life_tokens=0.0), "half_life_tokens"),
        (lambda: create_policy(max_bytes_per_s=float("nan")), "max_bytes_per_s"),
        (lambda: create_policy(prior=np.full(8, np.nan)), "prior"),
        (lambda: create_policy().observe(counts(1, 2), 1), "expected"),
        (lambda: create_policy().observe(counts(1, 2, 3, 4, 5, 6, 7, -8), 1), "negative"),
        (lambda: create_policy().propose(-1.0), "elapsed_s"),
        (lambda: create_policy().propose(float("nan")), "elapsed_s"),
    ],
)
def test_what_makes_no_sense_is_refused(call, problem):
    with pytest.raises(ValueError, match=problem):
        call()


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5]), max_size=30), st.integers(0, 30))
def test_the_smallest_are_those_that_a_stable_sort_puts_first(values, count):
    array, count = np.array(values), min(count, len(values))
    assert _smallest(array, count).tolist() == np.argsort(array, kind="stable")[:count].tolist()
