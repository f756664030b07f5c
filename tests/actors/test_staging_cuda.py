"""On a GPU the host runs ahead of kernels and copies: only events keep a slot's readers and writers apart."""

import random

import pytest
import torch

from actors.config import ShardConfig
from actors.expert_tiers import TieredExpertSource, create_expert_source, load_resident
from actors.staging import CudaCopier, StagedPages
from kernels.reference.experts import view_memory
from placement.plan import spread_evenly
from tests.unit.actors.builders import create_contents, create_pool, create_reader, map_pool

pytestmark = pytest.mark.gpu

EXPERTS_PER_LAYER = (12, 9, 16)
SLOW = 2_000_000
"""Clock cycles of a kernel that does nothing, about a millisecond."""


@pytest.mark.parametrize(("num_resident", "num_slots"), [(0, 2), (0, 5), (10, 4), (37, 2)])
@pytest.mark.parametrize("slow", ["kernels", "copies"])
def test_every_kernel_reads_the_pages_of_its_group(num_resident, num_slots, slow):
    device = torch.device("cuda")
    pool = map_pool(create_pool(create_contents(EXPERTS_PER_LAYER, hidden_size=1024, intermediate_size=512)))
    plan = spread_evenly(EXPERTS_PER_LAYER, num_resident)
    copier = CudaCopier(device)
    slow_stream = torch.cuda.current_stream() if slow == "kernels" else copier._stream
    memory = torch.zeros(num_slots, pool.layout.num_bytes, dtype=torch.uint8, device=device)
    reader = create_reader(pool)
    resident = load_resident(reader, plan, copier, device)
    source = TieredExpertSource(reader, plan, resident, StagedPages(memory, reader.read, copier))
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
                    # From the host's copy of the table: reading the device's would wait for the device.
                    address = source._table._known[layer][expert]
                    addresses.append((address, group.addresses[expert].clone()))
                    page = view_memory(address, pool.layout.num_bytes, device)
                    pages.append((pool.directory.index(layer, expert), page.clone()))
    for index, page in pages:
        assert torch.equal(page.cpu(), pool.pages[index]), f"page {index}"
    for expected, found in addresses:
        assert int(found) == expected
    source.close()


def test_reading_the_pool_in_place_is_refused_as_long_as_the_device_cannot():
    pages = create_reader(map_pool(create_pool(create_contents(EXPERTS_PER_LAYER))))
    with pytest.raises(ValueError, match="direct"):
        create_expert_source(
            pages, spread_evenly(EXPERTS_PER_LAYER, 0), ShardConfig(staging="direct"), torch.device("cuda")
        )
