"""On a GPU the host runs ahead of kernels and copies: only events keep a slot's readers and writers apart."""

import random

import pytest
import torch

from actors.config import ShardConfig
from actors.cuda_driver import CudaDriver
from actors.expert_tiers import TieredExpertSource, create_expert_source
from actors.host_pool import HostPool, MappedPool
from actors.in_place import InPlaceLayers
from actors.page_loading import load_pages
from actors.pinned_memory import PinError, PinnedMemory
from actors.staging import CudaCopier, StagedPages
from kernels.reference.experts import view_memory
from placement.plan import PlacementPlan, spread_evenly
from tests.unit.actors.builders import create_contents, create_pool, create_reader, random_page

pytestmark = pytest.mark.gpu

EXPERTS_PER_LAYER = (12, 9, 16)
SLOW = 2_000_000
"""Clock cycles of a kernel that does nothing, about a millisecond."""


@pytest.mark.parametrize(("num_resident", "num_slots"), [(0, 2), (0, 5), (10, 4), (37, 2)])
@pytest.mark.parametrize("slow", ["kernels", "copies"])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_every_kernel_reads_the_pages_of_its_group(num_resident, num_slots, slow, is_pinned):
    device = torch.device("cuda")
    owner, pool, pinned = create_pinned_pool(is_pinned=is_pinned)
    plan = spread_evenly(EXPERTS_PER_LAYER, num_resident)
    copier = CudaCopier(device)
    slow_stream = torch.cuda.current_stream() if slow == "kernels" else copier._stream
    memory = torch.zeros(num_slots, pool.layout.num_bytes, dtype=torch.uint8, device=device)
    reader = create_reader(pool)
    resident = load_pages(reader, hot_pages(plan, pool), copier, device)
    in_place = InPlaceLayers(reader, device, can_read_pool=False)
    staged = StagedPages(memory, reader.read, copier)
    source = TieredExpertSource(reader, plan, resident, staged, in_place)
    rng = random.Random(0)
    pages: list[tuple[int, torch.Tensor]] = []
    addresses: list[tuple[int, torch.Tensor]] = []
    for _ in range(3):
        for layer, num_experts in enumerate(EXPERTS_PER_LAYER):
            with torch.cuda.stream(slow_stream):
                torch.cuda._sleep(SLOW)
            for group in source.stream(layer, sorted(rng.sample(range(num_experts), num_experts - 2))):
                with torch.cuda.stream(slow_stream):
                    torch.cuda._sleep(SLOW)
                for expert in group.experts:
                    # As the host has it: reading the device's table would wait for the device.
                    index = pool.directory.index(layer, expert)
                    hot = hot_pages(plan, pool)
                    address = resident[hot.index(index)].data_ptr() if index in hot else staged.join(index)
                    addresses.append((address, group.addresses[expert].clone()))
                    page = view_memory(address, pool.layout.num_bytes, device)
                    pages.append((index, page.clone()))
    for index, page in pages:
        assert torch.equal(page.cpu(), pool.pages[index]), f"page {index}"
    for expected, found in addresses:
        assert int(found) == expected
    source.close()
    pinned.close()


@pytest.mark.parametrize("slow", ["kernels", "copies"])
def test_prefetched_slots_are_filled_before_they_are_read_and_read_before_they_are_filled_again(slow):
    owner, pool, pinned = create_pinned_pool()
    num_slots = 3
    config = ShardConfig(staging="direct", prefetch_mib=num_slots * pool.layout.num_bytes / 2**20)
    plan = spread_evenly(EXPERTS_PER_LAYER, 10)
    source = create_expert_source(create_reader(pool), plan, config, torch.device("cuda"), pinned=pinned)
    prefetcher = source._prefetcher
    assert prefetcher is not None
    slow_stream = torch.cuda.current_stream() if slow == "kernels" else prefetcher._stream
    rng = random.Random(0)
    copies: list[tuple[int, torch.Tensor]] = []
    tables: list[tuple[list[int], torch.Tensor]] = []
    brought: list[int] = []
    for step in range(6):
        for layer, num_experts in enumerate(EXPERTS_PER_LAYER):
            group = source.in_place(layer, 1)
            assert group is not None
            predicted = sorted(rng.sample(range(EXPERTS_PER_LAYER[(layer + 1) % 3]), 4))
            with torch.cuda.stream(slow_stream):
                torch.cuda._sleep(SLOW)
            if layer < 2:
                source.predict(layer + 1, torch.tensor([predicted], device="cuda"))
            torch.cuda._sleep(SLOW // 10)
            expected = source._in_place.addresses[layer].clone()
            for slot, expert in enumerate(brought):
                target = prefetcher._slots[layer % 2, slot]
                expected[expert] = target.data_ptr()
                copies.append((pool.directory.index(layer, expert), target.clone()))
            tables.append(((step, layer), expected, group.addresses.clone()))
            cold = [e for e in predicted if e not in plan.hot_experts[(layer + 1) % 3]]
            brought = cold[:num_slots] if layer < 2 else []
            assert num_experts == len(group.experts)
    for index, page in copies:
        assert torch.equal(page.cpu(), pool.pages[index]), f"page {index}"
    for where, expected, found in tables:
        assert torch.equal(expected, found), where
    source.close()
    pinned.close()


def test_a_gpu_reads_registered_pages_where_they_are_in_the_pool():
    owner, pool, pinned = create_pinned_pool()
    config, plan = ShardConfig(staging="direct"), spread_evenly(EXPERTS_PER_LAYER, 5)
    source = create_expert_source(create_reader(pool), plan, config, torch.device("cuda"), pinned=pinned)
    for layer, num_experts in enumerate(EXPERTS_PER_LAYER):
        group = source.in_place(layer, 1)
        assert group is not None
        for expert in range(num_experts):
            page = view_memory(int(group.addresses[expert]), pool.layout.num_bytes, torch.device("cuda"))
            assert torch.equal(page.cpu(), pool.pages[pool.directory.index(layer, expert)])
    source.close()
    pinned.close()


def test_a_failed_registration_leaves_no_error_behind_and_the_pages_usable():
    owner, pool, pinned = create_pinned_pool()
    with pytest.raises(PinError, match="ALREADY_REGISTERED"):
        PinnedMemory(pool.pages, CudaDriver())
    assert int(torch.ones(8, device="cuda").sum()) == 8
    pinned.close()
    again = PinnedMemory(pool.pages, CudaDriver(), max_chunk_bytes=2**20)
    assert torch.equal(pool.pages[3].cuda().cpu(), owner.page(3))
    again.close()


def test_damaged_hot_pages_are_found_on_the_gpu_and_read_again():
    owner, _, pinned = create_pinned_pool()
    pinned.close()
    owner.page(4)[17] ^= 1
    pool = MappedPool(owner.region, owner.region.contents)
    loaded = load_pages(
        create_reader(pool), range(12), CudaCopier(torch.device("cuda")), torch.device("cuda")
    )
    for page in range(12):
        assert torch.equal(loaded[page].cpu(), random_page(page, pool.layout.num_bytes))


def create_pinned_pool(*, is_pinned: bool = True) -> tuple[HostPool, MappedPool, PinnedMemory]:
    torch.zeros(1, device="cuda")
    owner = create_pool(create_contents(EXPERTS_PER_LAYER, hidden_size=1024, intermediate_size=512))
    pool = MappedPool(owner.region, owner.region.contents, writable=True)
    return owner, pool, PinnedMemory(pool.pages if is_pinned else pool.pages[:0], CudaDriver())


def hot_pages(plan: PlacementPlan, pool: MappedPool) -> list[int]:
    return [pool.directory.index(layer, e) for layer, hot in enumerate(plan.hot_experts) for e in hot]
