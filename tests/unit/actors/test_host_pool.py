import gc
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
import torch

from actors.host_pool import HostPool, MappedPool, pool_contents, region_bytes
from actors.messages import PoolRegion
from actors.page_directory import PageDirectory
from actors.shared_memory import AttachError
from kernels.formats import PageLayout
from model.config import ModelConfig
from model.expert_pages import local_experts_per_layer
from model.expert_source import ExpertPageError
from model.parallel import ParallelLayout
from model.tiny import tiny_config
from placement.plan import PlacementPlan
from tests.unit.actors.builders import create_contents, create_pool, map_pool

_SPAWN = multiprocessing.get_context("spawn")


def test_a_shard_sees_exactly_the_pages_that_were_filled():
    pool = create_pool(create_contents((3, 2, 4)))
    mapped = map_pool(pool)
    assert mapped.directory.num_pages == 9
    for page in range(9):
        assert torch.equal(mapped.read(page), pool.page(page))
    assert mapped.pages.data_ptr() % 4096 == 0


def test_a_region_has_no_name_and_is_just_as_large_as_its_pages():
    pool = create_pool(create_contents((5,)))
    assert pool.region.segment.num_bytes == 2 * 4096 + 5 * pool.layout.num_bytes
    assert not [name for name in os.listdir("/dev/shm") if "hotset" in name]


def test_a_page_that_changed_after_its_checksum_is_an_error_that_names_layer_and_expert():
    pool = create_pool(create_contents((3, 2), rank=3, world_size=4, ep_size=2))
    pool.page(4)[100] ^= 1
    mapped = map_pool(pool)
    assert torch.equal(mapped.read(3), pool.page(3))
    for _ in range(2):  # a failed read does not count as the first
        with pytest.raises(ExpertPageError, match="layer 1, expert 3: rank 3"):
            mapped.read(4)


def test_without_verification_a_changed_page_is_read_as_it_is():
    pool = create_pool(create_contents())
    pool.page(0)[0] ^= 1
    assert torch.equal(map_pool(pool, verify_checksums=False).read(0), pool.page(0))


@pytest.mark.parametrize("change", [{"model_hash": "other"}, {"rank": 1}, {"experts_per_layer": (2, 3)}])
def test_a_region_of_another_model_or_rank_is_refused(change):
    pool = create_pool(create_contents())
    expected = msgspec.structs.replace(pool.region.contents, **change)
    with pytest.raises(AttachError, match="needed is"):
        MappedPool(pool.region, expected)


def test_a_region_of_another_size_is_refused():
    pool = create_pool(create_contents())
    with pytest.raises(AttachError, match="bytes"):
        MappedPool(pool.region, create_contents((3, 3)))


def test_a_region_that_is_not_complete_is_refused():
    pool = HostPool(create_contents())
    with pytest.raises(AttachError, match="not filled"):
        map_pool(pool)


def test_other_memory_is_refused():
    pool = create_pool(create_contents())
    with Path("/proc/self/status").open() as other:
        segment = msgspec.structs.replace(pool.region.segment, fd=other.fileno())
        with pytest.raises(AttachError, match="sealed"):
            MappedPool(PoolRegion(segment=segment, contents=pool.region.contents), pool.region.contents)


def _own_a_pool(connection: Connection) -> None:
    pool = create_pool(create_contents(), seed=7)
    connection.send(pool.region)
    connection.recv()


def mapped_inodes() -> set[int]:
    return {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines()}


def test_the_mapping_outlives_the_owner_and_nothing_outlives_the_mapping():
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_own_a_pool, args=(theirs,))
    process.start()
    region = ours.recv()
    mapped = MappedPool(region, region.contents)
    inode = os.stat(f"/proc/{region.segment.pid}/fd/{region.segment.fd}").st_ino
    assert inode in mapped_inodes()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    expected = create_pool(create_contents(), seed=7)
    for page in range(mapped.directory.num_pages):
        assert torch.equal(mapped.read(page), expected.page(page))
    with pytest.raises(AttachError, match="shared memory"):
        MappedPool(region, region.contents)
    del mapped, expected
    gc.collect()
    assert inode not in mapped_inodes()


def test_a_view_of_a_page_keeps_the_memory_mapped():
    pool = create_pool(create_contents())
    page, expected = map_pool(pool).read(0), pool.page(0).clone()
    pool.close()
    del pool
    gc.collect()
    assert torch.equal(page, expected)


def test_a_bounded_region_leaves_out_the_hot_pages_of_a_plan_first_and_tells_who_maps_it():
    model = ModelConfig.model_validate(tiny_config()["text_config"])
    parallel = ParallelLayout(1, 2, 2)
    plan = PlacementPlan(tuple((0, 3) if layer % 3 else (1,) for layer in range(12)) + ((0,), (), (1,)))
    directory = PageDirectory(local_experts_per_layer(model, parallel))
    hot = {directory.index(layer, e) for layer, experts in enumerate(plan.hot_experts) for e in experts}
    num_cold = directory.num_pages - plan.num_hot
    pool = create_pool(pool_contents("0123", model, parallel, num_cold, plan))
    assert {page for page in range(directory.num_pages) if not pool.holds(page)} == hot
    mapped = map_pool(pool)
    assert [mapped.holds(page) for page in range(directory.num_pages)] == [
        pool.holds(page) for page in range(directory.num_pages)
    ]


def test_the_cold_pages_of_a_layer_lie_side_by_side():
    contents = create_contents((5, 4))
    plan = PlacementPlan(((0, 3), (1,)))
    directory = PageDirectory((5, 4))
    hot = sum(
        1 << directory.index(layer, e) for layer, experts in enumerate(plan.hot_experts) for e in experts
    )
    pool = create_pool(msgspec.structs.replace(contents, hot_pages=hot.to_bytes(2, "little")))
    mapped = map_pool(pool)
    offsets = [
        (mapped.read(p).data_ptr() - mapped.pages.data_ptr()) // pool.layout.num_bytes for p in range(9)
    ]
    assert offsets == [3, 0, 1, 4, 2, 5, 8, 6, 7]
    for page in range(9):
        assert torch.equal(mapped.read(page), pool.page(page))


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_a_region_of_the_released_model_takes_hardly_more_than_its_pages(ep_size):
    experts = tuple([384 // ep_size] * 40 + [128 // ep_size] * 3)
    contents = create_contents(
        experts, world_size=8, ep_size=ep_size, hidden_size=5120, intermediate_size=2304 * ep_size // 8
    )
    page_bytes = sum(experts) * PageLayout(5120, 2304 * ep_size // 8).num_bytes
    assert page_bytes <= region_bytes(contents) < 1.0001 * page_bytes
