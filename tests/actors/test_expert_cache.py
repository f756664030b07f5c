import shutil
from pathlib import Path

import pytest
import ray

from actors.config import ExpertCacheConfig, ShardConfig
from actors.expert_cache import start_expert_cache
from actors.names import CONTROL_GROUP, EXPERT_CACHE
from model.checkpoint import Checkpoint
from model.shard_file import CheckpointError

pytestmark = pytest.mark.ray


def test_the_cache_loads_answers_and_names_what_it_cannot_read(group, tiny_checkpoint, tmp_path):
    name = "layers.3.ffn.experts.5.w2.scale"
    damaged = copy_with_nan_scale(tiny_checkpoint, tmp_path / "damaged", name)
    good, bad = (
        start_expert_cache(
            group,
            namespace=namespace,
            checkpoint=path,
            shard=ShardConfig(world_size=2),
            config=ExpertCacheConfig(),
        )
        for namespace, path in (("test-good", tiny_checkpoint), ("test-bad", damaged))
    )
    with pytest.raises(CheckpointError, match=name):
        ray.get(bad.load.remote([]))
    regions = ray.get(good.load.remote([]))
    cache = ray.get_actor(EXPERT_CACHE, "test-good")
    stats = ray.get(cache.stats.options(concurrency_group=CONTROL_GROUP).remote())
    assert (
        stats.num_filled_pages == stats.num_pages == sum(sum(r.contents.experts_per_layer) for r in regions)
    )
    ray.get(cache.check_health.options(concurrency_group=CONTROL_GROUP).remote())
    ray.get([cache.shutdown.remote(), cache.shutdown.remote()])


def copy_with_nan_scale(checkpoint: Path, damaged: Path, name: str) -> Path:
    shutil.copytree(checkpoint, damaged)
    location = Checkpoint.open(damaged).location(name)
    with location.path.open("r+b") as file:
        file.seek(location.offset)
        file.write(b"\xff")  # ue8m0's NaN
    return damaged
