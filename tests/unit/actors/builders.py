"""Builders of pools with random pages, for tests of what reads them."""

import torch

from actors.host_pool import HostPool, MappedPool
from actors.messages import PoolContents


def create_contents(
    experts_per_layer: tuple[int, ...] = (3, 2),
    rank: int = 0,
    world_size: int = 1,
    ep_size: int = 1,
    hidden_size: int = 32,
    intermediate_size: int = 32,
) -> PoolContents:
    return PoolContents(
        model_hash="0123",
        rank=rank,
        world_size=world_size,
        ep_size=ep_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        experts_per_layer=experts_per_layer,
    )


def create_pool(contents: PoolContents, seed: int = 0) -> HostPool:
    """A complete region of random pages. Keep it as long as others have to map it."""
    pool = HostPool(contents)
    generator = torch.Generator().manual_seed(seed)
    for page in range(pool.directory.num_pages):
        shape = pool.page(page).shape
        pool.page(page).copy_(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))
        pool.seal(page)
    pool.complete()
    return pool


def map_pool(pool: HostPool, *, verify_checksums: bool = True) -> MappedPool:
    return MappedPool(pool.region, pool.region.contents, verify_checksums=verify_checksums)
