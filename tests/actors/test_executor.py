import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.checksums import page_checksum
from actors.config import ShardConfig
from actors.messages import ShardStats
from actors.names import CONTROL_GROUP, EXPERT_CACHE
from actors.process import OtherProcess
from deployment.cache_keeper import keep_expert_cache
from deployment.errors import ShardsLostError
from model.checkpoint import Checkpoint
from model.expert_pages import fill_page, local_experts_per_layer, page_layout
from model.parallel import ParallelLayout
from placement.engine_plan import EnginePlan, ExpertLayout
from placement.plan import create_plan
from placement.profile import VERSION, PhaseProfile, Profile
from tests.actors.fakes import FakeCore, create_step

pytestmark = pytest.mark.ray


def expected_sum(checkpoint_path: Path, world_size: int, ep_size: int) -> int:
    """Sum of the checksums of all pages of all ranks, straight from the checkpoint."""
    checkpoint = Checkpoint.open(checkpoint_path)
    config, total = checkpoint.config.text_config, 0
    for rank in range(world_size):
        layout = ParallelLayout(rank, world_size, ep_size)
        page = torch.empty(page_layout(config, layout).num_bytes, dtype=torch.uint8)
        for layer, num_experts in enumerate(local_experts_per_layer(config, layout)):
            for expert in range(num_experts):
                fill_page(page, checkpoint, config, layout, layer, expert)
                total += page_checksum(page) % 2**32
    return total


def stats_after(num_steps: int, shard: ActorHandle) -> ShardStats:
    """Statistics of a shard that finishes the last step about when rank 0 replies to it."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        stats: ShardStats = ray.get(shard.stats.options(concurrency_group=CONTROL_GROUP).remote())
        if stats.num_steps == num_steps:
            return stats
    raise AssertionError(f"no {num_steps} steps in time: {stats}")


def assert_gone(processes: list[OtherProcess], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    left = [p.pid for p in processes if not p.is_gone(max(0.0, deadline - time.monotonic()))]
    assert not left, f"processes {left} are left"


def random_plan(checkpoint_path: Path, world_size: int, ep_size: int, num_hot: int) -> EnginePlan:
    """The plan for a random profile."""
    checkpoint = Checkpoint.open(checkpoint_path)
    model = checkpoint.config.text_config
    layout = ExpertLayout.of(model, world_size, ep_size)
    rng = random.Random(5)
    decode, prefill = (
        PhaseProfile(9, tuple(tuple(rng.randrange(9) for _ in range(n)) for n in layout.experts_per_layer))
        for _ in range(2)
    )
    profile = Profile(VERSION, checkpoint.content_hash, {"random": 18}, prefill, decode)
    budget_bytes = num_hot * layout.page_bytes
    return create_plan(profile, model, layout, arm="static", budget_bytes=budget_bytes, num_staging_slots=0)


@pytest.mark.parametrize(
    ("config", "is_planned"),
    [
        (ShardConfig(world_size=2, max_resident_pages=20, num_staging_slots=3), False),
        (ShardConfig(world_size=4, ep_size=2, staging="direct"), True),
    ],
)
def test_shards_read_their_pages_from_the_cache_and_add_up_over_all_ranks(
    group, tiny_checkpoint, config, is_planned
):
    world_size, ep_size = config.world_size, config.ep_size or config.world_size
    plan = random_plan(tiny_checkpoint, world_size, ep_size, num_hot=20) if is_planned else None
    max_host_pages = 30 if is_planned else None
    core = FakeCore(group, "test-steps", tiny_checkpoint, config, plan, max_host_pages)
    expected = expected_sum(tiny_checkpoint, world_size, ep_size)
    for step_id in range(3):
        output = core.execute(create_step(step_id))
        assert [s.token.token_id for s in output.sequences if s.token] == [expected]
        assert output.traffic.num_hot == 20
    last = world_size - 1
    stats = stats_after(num_steps=3, shard=ray.get_actor(f"gpu_shard_{last}", "test-steps"))
    assert (stats.rank, stats.num_hot_pages) == (last, 20)
    if plan is not None:
        assert plan.of_rank(0) != plan.of_rank(last)
        assert stats.num_host_pages == 30
        assert [layer.num_hot for layer in stats.layers] == [3 * len(hot) for hot in plan.of_rank(last)]
    processes = [OtherProcess(pid) for pid in core.shard_pids()]
    core.shutdown()
    assert_gone(processes, within_s=0)


def test_a_rank_that_is_killed_in_a_step_ends_all_and_a_new_gang_takes_its_place(group, tiny_checkpoint):
    core = FakeCore(group, "test-kill", tiny_checkpoint, ShardConfig(world_size=2))
    expected = core.execute(create_step(0))
    processes = [OtherProcess(pid) for pid in core.shard_pids()]
    start = time.monotonic()
    with pytest.raises(ShardsLostError, match="rank 1 died"):
        core.execute(create_step(1, (1, signal.SIGKILL)))
    assert time.monotonic() - start < 10
    assert_gone(processes, within_s=0)
    core.start()
    assert core.execute(create_step(0)).sequences == expected.sequences
    with pytest.raises(ShardsLostError, match=r"(?s)rank 0 failed in step 7: .*told to fail"):
        core.execute(create_step(7, (0, 0)))
    core.shutdown()


def test_shards_are_rebuilt_from_a_pool_whose_cache_died_and_was_handed_over(group, tiny_checkpoint):
    core = FakeCore(group, "test-heir", tiny_checkpoint, ShardConfig(world_size=2))
    expected = core.execute(create_step(0))
    cache = ray.get_actor(EXPERT_CACHE, "test-heir")
    os.kill(ray.get(cache.load.remote([]))[0].segment.pid, signal.SIGKILL)
    assert core.execute(create_step(1)).sequences == expected.sequences
    asyncio.run(keep_until_loaded(cache, "test-heir"))
    with pytest.raises(ShardsLostError, match="rank 1 died"):
        core.execute(create_step(2, (1, signal.SIGKILL)))
    regions = ray.get(cache.load.remote([]))
    core.start()
    assert core.execute(create_step(0)).sequences == expected.sequences
    assert ray.get(cache.load.remote([])) == regions
    core.shutdown()


async def keep_until_loaded(cache: ActorHandle, namespace: str) -> None:
    keeper = asyncio.create_task(keep_expert_cache(cache, namespace, world_size=2))
    try:
        async with asyncio.timeout(60):
            while True:
                with suppress(RayError):
                    stats = await cache.stats.options(concurrency_group=CONTROL_GROUP).remote()
                    if stats.is_loaded:
                        return
                await asyncio.sleep(0.1)  # between polls
    finally:
        keeper.cancel()


def test_a_rank_that_stops_in_a_step_ends_all_when_the_step_has_taken_too_long(group, tiny_checkpoint):
    config = ShardConfig(world_size=2, step_timeout_s=3)
    core = FakeCore(group, "test-stop", tiny_checkpoint, config)
    processes = [OtherProcess(pid) for pid in core.shard_pids()]
    with pytest.raises(ShardsLostError, match="step 1"):
        core.execute(create_step(1, (1, signal.SIGSTOP)))
    assert_gone(processes, within_s=0)
    core.shutdown()


def test_engines_in_one_cluster_do_not_meet_and_a_killed_one_leaves_nothing(group, tiny_checkpoint):
    config = ShardConfig(world_size=2)
    first, second = (
        ray.remote(FakeCore).options(num_cpus=0).remote(group, namespace, tiny_checkpoint, config)
        for namespace in ("test-first", "test-second")
    )
    first_pids, second_pids = ray.get([first.all_pids.remote(), second.all_pids.remote()])
    assert not set(first_pids) & set(second_pids)
    processes = [OtherProcess(pid) for pid in first_pids]
    os.kill(first_pids[0], signal.SIGKILL)
    assert_gone(processes, within_s=30)
    assert ray.get(second.execute.remote(create_step(0))).step_id == 0
    ray.get(second.shutdown.remote())
