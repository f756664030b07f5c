"""Builders of pools with random pages, for tests of what reads them."""

from pathlib import Path

import torch
from torch import Tensor

from actors.host_pool import HostPool, MappedPool
from actors.messages import PoolContents
from actors.page_reader import PageReader
from model.shard_file import CheckpointError


def create_contents(
    experts_per_layer: tuple[int, ...] = (3, 2),
    rank: int = 0,
    world_size: int = 1,
    ep_size: int = 1,
    hidden_size: int = 32,
    intermediate_size: int = 32,
    max_host_pages: int | None = None,
) -> PoolContents:
    return PoolContents(
        model_hash="0123",
        rank=rank,
        world_size=world_size,
        ep_size=ep_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        experts_per_layer=experts_per_layer,
        max_host_pages=max_host_pages,
    )


def random_page(page: int, num_bytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + page)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def create_pool(contents: PoolContents, seed: int = 0) -> HostPool:
    """A complete region of random pages. Keep it as long as others have to map it."""
    pool = HostPool(contents)
    for page in filter(pool.holds, range(pool.directory.num_pages)):
        pool.page(page).copy_(random_page(page, pool.layout.num_bytes, seed))
        pool.seal(page)
    pool.complete()
    return pool


class FakeCheckpoint:
    """The pages of `create_pool`, but for those that are damaged or cannot be read."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.damaged: set[int] = set()
        self.unreadable: set[int] = set()
        self.reads: list[int] = []

    def fill(self, out: Tensor, page: int) -> None:
        self.reads.append(page)
        if page in self.unreadable:
            raise CheckpointError(Path("shard"), "cannot be read")
        out.copy_(random_page(page, out.numel(), self.seed))
        if page in self.damaged:
            out[0] ^= 1


def create_reader(pool: MappedPool, checkpoint: FakeCheckpoint | None = None) -> PageReader:
    return PageReader(pool, (checkpoint or FakeCheckpoint()).fill)


def map_pool(pool: HostPool, *, verify_checksums: bool = True) -> MappedPool:
    return MappedPool(pool.region, pool.region.contents, verify_checksums=verify_checksums)
