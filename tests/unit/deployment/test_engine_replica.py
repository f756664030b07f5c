"""An engine that serves, but not as it should, says so."""

import pytest

from actors.messages import ShardStats
from deployment.engine_replica import shard_warnings


def create_stats(rank: int, is_pool_pinned: bool | None) -> ShardStats:
    return ShardStats(rank, 0, 8, 4, 8, is_pool_pinned, ())


@pytest.mark.parametrize("is_pool_pinned", [None, True])
def test_shards_on_cpus_and_those_with_a_pinned_pool_need_no_warning(is_pool_pinned):
    assert shard_warnings([create_stats(rank, is_pool_pinned) for rank in range(2)]) == []


def test_ranks_without_a_pinned_pool_are_named():
    stats = [create_stats(0, True), create_stats(1, False), create_stats(2, False)]
    (warning,) = shard_warnings(stats)
    assert "[1, 2]" in warning
