"""A token bucket admits what its definition says, and tells truly when to come back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployment.rate_limit import TokenBucket

LIMITS = st.integers(1, 100)
PAUSES_S = st.lists(st.floats(0, 90) | st.sampled_from([0.0, 0.5, 60.0]), max_size=60)


def test_a_minutes_worth_may_come_at_once_and_no_more():
    bucket = TokenBucket(3, now_s=100.0)
    assert [bucket.take(100.0) for _ in range(4)] == [None, None, None, 20.0]
    assert bucket.take(119.9) == pytest.approx(0.1)
    assert bucket.take(120.1) is None
    assert bucket.take(120.1) == pytest.approx(19.9)


def test_what_is_not_used_is_not_kept_beyond_a_minutes_worth():
    bucket = TokenBucket(2, now_s=0.0)
    assert [bucket.take(1e6) for _ in range(3)] == [None, None, 30.0]


@given(limit=LIMITS, pauses_s=PAUSES_S)
def test_no_window_has_more_than_its_share(limit: int, pauses_s: list[float]):
    bucket = TokenBucket(limit, now_s=0.0)
    times_s = list(itertools.accumulate(pauses_s))
    admitted = [time_s for time_s in times_s if bucket.take(time_s) is None]
    for first, begin_s in enumerate(admitted):
        for last in range(first, len(admitted)):
            assert last - first + 1 <= limit + limit / 60 * (admitted[last] - begin_s) + 1e-6


@given(limit=LIMITS, pauses_s=PAUSES_S)
def test_who_waits_as_told_is_admitted_and_who_comes_earlier_is_not(limit: int, pauses_s: list[float]):
    bucket = TokenBucket(limit, now_s=0.0)
    now_s = 0.0
    for pause_s in pauses_s:
        now_s += pause_s
        wait_s = bucket.take(now_s)
        if wait_s is not None:
            assert 0 < wait_s <= 60 / limit + 1e-9
            assert bucket.take(now_s + wait_s * 0.9) is not None
            now_s += wait_s + 1e-6
            assert bucket.take(now_s) is None


@given(limit=LIMITS)
def test_a_clock_that_stands_or_goes_back_gives_nothing(limit: int):
    bucket = TokenBucket(limit, now_s=50.0)
    for _ in range(limit):
        assert bucket.take(50.0) is None
    assert bucket.take(50.0) is not None
    assert bucket.take(20.0) is not None
