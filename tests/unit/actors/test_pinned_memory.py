"""Registration with CUDA: in chunks that cut no page, all or nothing, and undone in reverse."""

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.cuda_driver import CudaDriverError
from actors.host_pool import MappedPool
from actors.pinned_memory import PinError, PinnedMemory, chunks
from actors.shard import pin_pool
from tests.unit.actors.builders import create_contents, create_pool


class FakeDriver:
    """Registers a number of ranges, then fails."""

    def __init__(self, num_until_failure: int | None = None) -> None:
        self.num_until_failure = num_until_failure
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.registered) == self.num_until_failure:
            raise CudaDriverError("cuMemHostRegister_v2 gave CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.registered[address] = num_bytes
        self.calls.append(("register", address))

    def unregister(self, address: int) -> None:
        if address not in self.registered:
            raise CudaDriverError("cuMemHostUnregister gave CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED (713)")
        del self.registered[address]
        self.calls.append(("unregister", address))


def create_pages(num_pages: int, page_bytes: int) -> torch.Tensor:
    """Pages at the start of a machine page, as in a mapping."""
    memory = mmap.mmap(-1, max(1, num_pages * page_bytes))
    return torch.frombuffer(memory, dtype=torch.uint8)[: num_pages * page_bytes].view(num_pages, page_bytes)


@given(st.integers(0, 60), st.sampled_from([512, 1024, 4096, 6144, 8192, 11264]), st.integers(1, 200_000))
@settings(deadline=None)
def test_chunks_cover_every_page_once_and_cut_none(num_pages, page_bytes, max_chunk_bytes):
    pages = create_pages(num_pages, page_bytes)
    end = pages.data_ptr()
    for address, num_bytes in chunks(pages, max_chunk_bytes):
        assert address == end
        assert address % mmap.PAGESIZE == 0
        assert (address - pages.data_ptr()) % page_bytes == 0
        assert num_bytes <= max(max_chunk_bytes, page_bytes * mmap.PAGESIZE // 512)
        end += num_bytes
    assert end == pages.data_ptr() + pages.nbytes or num_pages == 0


def test_all_pages_are_registered_until_closed_in_reverse():
    driver, pages = FakeDriver(), create_pages(10, 4096)
    pinned = PinnedMemory(pages, driver, max_chunk_bytes=3 * 4096)
    assert [driver.registered[a] for a in sorted(driver.registered)] == [3 * 4096] * 3 + [4096]
    addresses = list(driver.registered)
    pinned.close()
    pinned.close()
    assert not driver.registered
    assert driver.calls[4:] == [("unregister", address) for address in reversed(addresses)]


def test_a_failure_leaves_nothing_registered_and_says_what_to_do():
    driver, pages = FakeDriver(num_until_failure=2), create_pages(10, 4096)
    with pytest.raises(PinError, match=r"CUDA_ERROR_OUT_OF_MEMORY.*allow_unpinned"):
        PinnedMemory(pages, driver, max_chunk_bytes=3 * 4096)
    assert not driver.registered
    registered = [address for call, address in driver.calls if call == "register"]
    assert driver.calls[2:] == [("unregister", address) for address in reversed(registered)]


def test_what_cannot_be_unregistered_does_not_keep_the_rest(caplog):
    driver, pages = FakeDriver(), create_pages(4, 4096)
    pinned = PinnedMemory(pages, driver, max_chunk_bytes=4096)
    del driver.registered[pages.data_ptr() + 2 * 4096]
    pinned.close()
    assert not driver.registered
    assert "stay registered" in caplog.text


def map_writable(pool) -> MappedPool:
    return MappedPool(pool.region, pool.region.contents, writable=True)


def is_writable(memory: torch.Tensor) -> bool:
    """Whether the mapping that a tensor lies in may be written, as the kernel says."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= memory.data_ptr() < end:
            return "w" in line.split()[1]
    raise AssertionError("not mapped")


def test_a_pool_is_registered_as_a_whole_and_written_no_more():
    pool, driver = create_pool(create_contents((5,))), FakeDriver()
    mapped = map_writable(pool)
    assert is_writable(mapped.pages)
    pinned = pin_pool(mapped, driver, allow_unpinned=False)
    assert driver.registered == {mapped.pages.data_ptr(): mapped.pages.nbytes}
    assert not is_writable(mapped.pages)
    assert torch.equal(mapped.read(3), pool.page(3))
    pinned.close()


def test_a_pool_that_cannot_be_registered_is_an_error_unless_that_is_allowed():
    pool = create_pool(create_contents((5,)))
    with pytest.raises(PinError, match="allow_unpinned"):
        pin_pool(map_writable(pool), FakeDriver(0), allow_unpinned=False)
    mapped = map_writable(pool)
    assert pin_pool(mapped, FakeDriver(0), allow_unpinned=True) is None
    assert not is_writable(mapped.pages)
    assert torch.equal(mapped.read(3), pool.page(3))
