from actors.heartbeats import Heartbeats, HeartbeatWatch


def test_every_rank_counts_its_own_beats_across_mappings():
    created = Heartbeats.create(3)
    attached = Heartbeats.attach(created.segment)
    attached.beat(2)
    attached.beat(2)
    created.beat(0)
    assert created.counts() == attached.counts() == [1, 0, 2]


def test_only_a_rank_that_stops_beating_is_stuck():
    watch = HeartbeatWatch(timeout_s=10)
    assert watch.stuck_ranks([1, 1], is_idle=True, now=0) == []
    assert watch.stuck_ranks([2, 1], is_idle=True, now=9) == []
    assert watch.stuck_ranks([3, 1], is_idle=True, now=11) == [1]
    assert watch.stuck_ranks([4, 2], is_idle=True, now=12) == []


def test_a_rank_that_computes_may_be_silent_and_starts_afresh_afterwards():
    watch = HeartbeatWatch(timeout_s=10)
    assert watch.stuck_ranks([1, 1], is_idle=True, now=0) == []
    assert watch.stuck_ranks([1, 1], is_idle=False, now=100) == []
    assert watch.stuck_ranks([1, 1], is_idle=True, now=109) == []
    assert watch.stuck_ranks([1, 1], is_idle=True, now=111) == [0, 1]
