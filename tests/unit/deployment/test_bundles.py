import pytest

from actors.config import ShardConfig
from deployment.bundles import placement_bundles, resolve_device, shard_bundle


@pytest.mark.parametrize(
    ("device", "num_gpus", "resolved"),
    [
        ("auto", 0, "cpu"),
        ("auto", 3, "cpu"),
        ("auto", 4, "cuda"),
        ("auto", 8, "cuda"),
        ("cpu", 8, "cpu"),
        ("cuda", 0, "cuda"),
    ],
)
def test_gpus_are_used_if_there_are_enough_unless_the_setting_says_otherwise(device, num_gpus, resolved):
    assert resolve_device(ShardConfig(world_size=4, device=device), num_gpus) == resolved


def test_every_gpu_shard_has_a_bundle_with_one_gpu():
    bundles = placement_bundles(4, "cuda")
    assert [bundles[shard_bundle(rank, "cuda")] for rank in range(4)] == [{"GPU": 1}] * 4
    assert len({shard_bundle(rank, "cuda") for rank in range(4)}) == 4


def test_cpu_shards_need_no_more_than_the_replica():
    assert placement_bundles(8, "cpu") == [{"CPU": 1}]
    assert {shard_bundle(rank, "cpu") for rank in range(8)} == {0}
