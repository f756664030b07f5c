import logging
import re
from pathlib import Path

import pytest
import torch

from actors import pool_loader
from actors.host_pool import MappedPool
from actors.pool_loader import HostMemoryError, PoolLoader
from actors.shared_memory import AttachError, SharedMapping
from model.checkpoint import Checkpoint
from model.expert_pages import fill_page
from model.parallel import ParallelLayout
from model.shard_file import CheckpointError


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoint)


@pytest.mark.parametrize(("world_size", "ep_size"), [(2, 2), (2, 1), (4, 2)])
def test_every_rank_gets_all_its_pages(checkpoint, world_size, ep_size):
    loader = PoolLoader(checkpoint, world_size, ep_size, num_threads=3)
    regions = loader.load()
    config = checkpoint.config.text_config
    assert [region.contents.rank for region in regions] == list(range(world_size))
    for rank, region in enumerate(regions):
        mapped = MappedPool(region, region.contents)
        expected = torch.empty(mapped.layout.num_bytes, dtype=torch.uint8)
        for page in range(mapped.directory.num_pages):
            layer, expert = mapped.directory.locate(page)
            fill_page(expected, checkpoint, config, ParallelLayout(rank, world_size, ep_size), layer, expert)
            assert torch.equal(mapped.read(page), expected), f"{rank=} {page=}"
    stats = loader.stats()
    assert stats.num_filled_pages == stats.num_pages == (12 * 8 + 3 * 4) * world_size // ep_size
    assert stats.num_bytes == sum(region.segment.num_bytes for region in regions)
    loader.close()


def test_loading_again_returns_the_same_regions(checkpoint):
    loader = PoolLoader(checkpoint, 1, 1, num_threads=1)
    assert loader.load() == loader.load()


def test_progress_is_logged(checkpoint, caplog):
    with caplog.at_level(logging.INFO):
        PoolLoader(checkpoint, 1, 1, num_threads=1).load()
    assert re.search("100 % of .* allocated.*100 % of .* filled.*loaded at .*disk", caplog.text, re.DOTALL)


def test_the_speed_of_loading_is_told_beside_that_of_the_disk(checkpoint, monkeypatch):
    monkeypatch.setattr(pool_loader, "read_speed", lambda path, num_threads, max_bytes: 5e9)
    loader = PoolLoader(checkpoint, 1, 1, num_threads=1)
    assert (loader.stats().load_bytes_per_s, loader.stats().disk_bytes_per_s) == (None, None)
    loader.load()
    stats = loader.stats()
    assert stats.load_bytes_per_s > 0
    assert stats.disk_bytes_per_s == 5e9
    loader.close()


def test_regions_are_asked_of_the_nodes_of_their_ranks(checkpoint, monkeypatch):
    asked = []
    monkeypatch.setattr(SharedMapping, "prefer_numa_node", lambda mapping, node: asked.append(node))
    loader = PoolLoader(checkpoint, 4, 4, num_threads=2)
    loader.load([1, None, 0, 1])
    assert asked == [1, 0, 1]
    loader.close()


def test_a_pool_larger_than_the_free_memory_is_refused_before_it_is_allocated(checkpoint, monkeypatch):
    monkeypatch.setattr(pool_loader, "available_memory_bytes", lambda: 2**20)
    with pytest.raises(HostMemoryError, match="0.00 GiB are available"):
        PoolLoader(checkpoint, 1, 1, num_threads=1).load()


@pytest.mark.parametrize("max_host_pages", [None, 0])
def test_an_expert_that_cannot_be_read_ends_loading_with_its_name(checkpoint, monkeypatch, max_host_pages):
    name = "layers.7.ffn.experts.2.w3.scale"
    read_into = Checkpoint.read_into

    def fail(self, out, tensor, rows=None, columns=None):
        if tensor == name:
            raise CheckpointError(Path("shard"), "bad", tensor)
        read_into(self, out, tensor, rows, columns)

    monkeypatch.setattr(Checkpoint, "read_into", fail)
    with pytest.raises(CheckpointError, match=name):
        PoolLoader(checkpoint, 2, 2, num_threads=2, max_host_pages=max_host_pages).load()


def test_a_pool_that_shards_still_map_is_adopted_and_only_damaged_pages_are_read_again(
    checkpoint, monkeypatch
):
    loader = PoolLoader(checkpoint, 2, 1, num_threads=2, max_host_pages=40)
    shards = [MappedPool(region, region.contents) for region in loader.load()]
    expected = [shard.pages.clone() for shard in shards]
    damaged = [page for page in range(shards[1].directory.num_pages) if shards[1].holds(page)][-3]
    loader._pools[1].page(damaged)[7] ^= 1
    loader.close()
    reads = []
    monkeypatch.setattr(pool_loader, "fill_page", lambda *args: (reads.append(args[4:]), fill_page(*args))[1])
    heir = PoolLoader(checkpoint, 2, 1, num_threads=2, max_host_pages=40)
    assert not heir.stats().is_loaded
    adopted = heir.adopt([shard.region for shard in shards])
    assert reads == [shards[1].directory.locate(damaged)]
    assert heir.stats().is_loaded
    assert heir.stats().num_filled_pages == 80
    assert heir.load() == adopted
    for region, pages in zip(adopted, expected, strict=True):
        assert torch.equal(MappedPool(region, region.contents).pages, pages)


def test_a_pool_of_another_layout_is_not_adopted(checkpoint):
    regions = PoolLoader(checkpoint, 2, 1, num_threads=1).load()
    with pytest.raises(AttachError, match=r"shared memory|bytes|needed is"):
        PoolLoader(checkpoint, 2, 2, num_threads=1).adopt(regions)
