"""HostPool: expert pages of one rank in shared memory, made by the ExpertCache and mapped by the shard.

0             length of the contents, then the contents themselves (`PoolContents`, msgpack)
4096 - 8      1 once every page is filled
4096          checksum of each page that the region holds (actors/checksums.py), 8 bytes
next multiple of 4096: those pages, in the order of PageDirectory
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Sequence
from typing import Final

import msgspec
import torch
from torch import Tensor

from actors.checksums import page_checksum, page_checksums
from actors.messages import PoolContents, PoolRegion
from actors.page_directory import PageDirectory
from actors.shared_memory import AttachError, SharedMapping
from kernels.formats import PageLayout
from model.config import ModelConfig
from model.expert_pages import local_experts_per_layer, page_layout
from model.expert_source import ExpertPageError
from model.parallel import ParallelLayout
from placement.plan import PlacementPlan, host_experts

_BLOCK: Final = 4096
_IS_COMPLETE: Final = _BLOCK // 8 - 1
"""Index of the word that is 1 once every page is filled."""


def pool_contents(
    model_hash: str,
    config: ModelConfig,
    parallel: ParallelLayout,
    max_host_pages: int | None = None,
    plan: PlacementPlan | None = None,
) -> PoolContents:
    """What the region of one rank has to hold.

    Args:
        model_hash: the checkpoint's `content_hash`.
        config: its dimensions.
        parallel: the rank.
        max_host_pages: bound of the pages in it.
        plan: of the rank; its hot pages are the first that are left out, and apart from the others.
    """
    layout = page_layout(config, parallel)
    directory = PageDirectory(local_experts_per_layer(config, parallel))
    hot_pages = b"" if plan is None else hot_page_bits(plan, directory)
    return PoolContents(
        model_hash=model_hash,
        rank=parallel.rank,
        world_size=parallel.world_size,
        ep_size=parallel.ep_size,
        hidden_size=layout.hidden_size,
        intermediate_size=layout.intermediate_size,
        experts_per_layer=directory.experts_per_layer,
        max_host_pages=max_host_pages,
        hot_pages=hot_pages,
    )


def hot_page_bits(plan: PlacementPlan, directory: PageDirectory) -> bytes:
    """`PoolContents.hot_pages` of a plan."""
    hot = [directory.index(layer, e) for layer, experts in enumerate(plan.hot_experts) for e in experts]
    return sum(1 << page for page in hot).to_bytes(-(-directory.num_pages // 8), "little")


def _hot_set_of(hot_pages: bytes, experts_per_layer: Sequence[int]) -> PlacementPlan:
    """The plan that `PoolContents.hot_pages` stands for; nothing is hot if that is empty."""
    bits, hot = int.from_bytes(hot_pages, "little"), []
    for num_experts in experts_per_layer:
        hot.append(tuple(e for e in range(num_experts) if bits >> e & 1))
        bits >>= num_experts
    return PlacementPlan(tuple(hot))


def region_bytes(contents: PoolContents) -> int:
    """Size of a region."""
    return _RegionLayout(contents).num_bytes


def num_host_pages(contents: PoolContents) -> int:
    """Pages that a region holds."""
    return len(_RegionLayout(contents).slot_of)


class HostPool:
    """The owner's side of a region.

    Protocol: fill `page(i)` and then `seal(i)`, for every page that it `holds`, from any number of threads but
    one per page; then `complete`, once. Nothing is written after that, but for pages that were damaged. Shards may
    map the region from then on, and keep it when the owner closes it or dies; then another process may `adopt` it.

    Invariant: in a complete region every page has the checksum recorded for it.

    Args:
        contents: what it is for.
        numa_node: where its memory should be; None: wherever the kernel puts it.
    """

    def __init__(self, contents: PoolContents, numa_node: int | None = None) -> None:
        layout = _RegionLayout(contents)
        name = f"hotset-pool-{contents.rank}"
        mapping = SharedMapping.create(name, layout.num_bytes, is_allocated=False)
        if numa_node is not None:
            mapping.prefer_numa_node(numa_node)
        self._take(mapping, layout, contents)
        self._views.write_contents(contents)

    @classmethod
    def adopt(cls, region: PoolRegion, expected: PoolContents) -> HostPool:
        """Own a complete region whose owner has died, through a process that maps it.

        Raises: AttachError if the region is gone, incomplete, or holds something else.
        """
        pool = cls.__new__(cls)
        mapping = _attach(region, expected, writable=True)
        pool._take(mapping, _RegionLayout(expected), expected)
        return pool

    def _take(self, mapping: SharedMapping, layout: _RegionLayout, contents: PoolContents) -> None:
        self._mapping = mapping
        self._views = _RegionViews(mapping, layout)
        self.region = PoolRegion(segment=mapping.segment, contents=contents)
        self.directory = layout.directory
        self.layout = layout.pages
        self._slot_of = layout.slot_of

    def allocate(self, offset: int, num_bytes: int) -> None:
        """Allocate a part of the region before it is filled; for any number of threads. Raises: OSError."""
        self._mapping.allocate(offset, min(num_bytes, self.region.segment.num_bytes - offset))

    def is_intact(self, page: int) -> bool:
        """Whether a page has the checksum that was recorded for it."""
        return page_checksum(self.page(page)) == self._views.checksums[self._slot_of[page]]

    def holds(self, page: int) -> bool:
        """Whether the region has room for a page; the others stay in the checkpoint."""
        return page in self._slot_of

    def page(self, page: int) -> Tensor:
        """Bytes of a page: `[layout.num_bytes]` uint8, writable."""
        return self._views.pages[self._slot_of[page]]

    def seal(self, page: int) -> None:
        """Record the checksum of a page that is filled."""
        self._views.checksums[self._slot_of[page]] = page_checksum(self.page(page))

    def complete(self) -> None:
        """Let shards map the region."""
        self._views.words[_IS_COMPLETE] = 1

    def close(self) -> None:
        """Let no one else map the region; safe to call twice."""
        self._mapping.close()


class MappedPool:
    """A shard's side of a region: read only.

    Invariant: with `verify_checksums`, `read` returns only pages that had their checksum once in this process: when
    first read, or in a copy that `check_copies` was given.

    Args:
        region: from the ExpertCache.
        expected: what this shard needs.
        verify_checksums: check every page once.
        writable: map it for writing until `make_read_only`: CUDA registers no other memory.
    Raises: AttachError if the region is gone, incomplete, or holds something else.
    """

    def __init__(
        self,
        region: PoolRegion,
        expected: PoolContents,
        *,
        verify_checksums: bool = True,
        writable: bool = False,
    ) -> None:
        layout = _RegionLayout(expected)
        self._mapping = _attach(region, expected, writable=writable)
        self._views = _RegionViews(self._mapping, layout)
        self.region = PoolRegion(segment=self._mapping.segment, contents=expected)
        """For a new owner, should the one that made it die."""
        ep_rank = ParallelLayout(expected.rank, expected.world_size, expected.ep_size).ep_rank
        self.first_experts = tuple(ep_rank * count for count in expected.experts_per_layer)
        """Global id of local expert 0, by layer."""
        self.directory = layout.directory
        self.layout = layout.pages
        self._contents = expected
        self._slot_of = layout.slot_of
        self._is_trusted = bytearray([not verify_checksums]) * len(layout.slot_of)

    @property
    def pages(self) -> Tensor:
        """All pages in place: `[pages that the region holds, layout.num_bytes]` uint8, never to be written.

        This is the memory that a CUDA shard registers for fast copies and direct reads.
        """
        return self._views.pages

    def make_read_only(self) -> None:
        """End what `writable` allowed. Raises: OSError."""
        self._mapping.make_read_only()

    def holds(self, page: int) -> bool:
        """Whether the region has a page."""
        return page in self._slot_of

    def peek(self, page: int) -> Tensor:
        """A page in place, right or not: `[layout.num_bytes]` uint8."""
        return self._views.pages[self._slot_of[page]]

    def check_copies(self, pages: Sequence[int], copies: Tensor) -> list[int]:
        """Check pages in copies of them, which may be on a device.

        Args:
            pages: numbers of pages that the region holds.
            copies: `[len(pages), layout.num_bytes]` uint8.
        Returns: those whose copy is not what was recorded; none is checked twice.
        """
        unchecked = [i for i, page in enumerate(pages) if not self._is_trusted[self._slot_of[page]]]
        if not unchecked:
            return []
        wrong = []
        for i, found in enumerate(page_checksums(copies).tolist()):
            if found == self.checksum(pages[i]):
                self._is_trusted[self._slot_of[pages[i]]] = True
            elif i in unchecked:
                wrong.append(pages[i])
        return wrong

    def read(self, page: int) -> Tensor:
        """A page in place: `[layout.num_bytes]` uint8.

        Raises: ExpertPageError if the page is corrupt.
        """
        slot = self._slot_of[page]
        if not self._is_trusted[slot]:
            found, recorded = page_checksum(self._views.pages[slot]), self.checksum(page)
            if found != recorded:
                raise ExpertPageError(
                    f"{self.name_of(page)} in the host pool is corrupt (checksum {found:x}, recorded {recorded:x})"
                )
            self._is_trusted[slot] = True
        return self._views.pages[slot]

    def checksum(self, page: int) -> int:
        """What a page's checksum was when it was loaded."""
        return self._views.checksums[self._slot_of[page]]

    def name_of(self, page: int) -> str:
        """What a page is called in messages."""
        layer, expert = self.directory.locate(page)
        expert_id = self.first_experts[layer] + expert
        return f"layer {layer}, expert {expert_id}: rank {self._contents.rank}'s page"


def _attach(region: PoolRegion, expected: PoolContents, *, writable: bool) -> SharedMapping:
    """Map a complete region that holds what is expected, and pass it on."""
    layout = _RegionLayout(expected)
    if region.segment.num_bytes != layout.num_bytes:
        raise AttachError(f"the pool region has {region.segment.num_bytes} bytes, not {layout.num_bytes}")
    mapping = SharedMapping.attach(region.segment, writable=writable, pass_on=True)
    views = _RegionViews(mapping, layout)
    held = views.read_contents()
    if held != expected:
        raise AttachError(f"the pool region holds {held}, needed is {expected}")
    if not views.words[_IS_COMPLETE]:
        raise AttachError(f"the pool region of rank {expected.rank} is not filled yet")
    return mapping


class _RegionLayout:
    """Where the parts of a region lie."""

    def __init__(self, contents: PoolContents) -> None:
        self.directory = PageDirectory(contents.experts_per_layer)
        self.pages = PageLayout(contents.hidden_size, contents.intermediate_size)
        plan = _hot_set_of(contents.hot_pages, contents.experts_per_layer)
        held = host_experts(contents.experts_per_layer, contents.max_host_pages, plan)
        pages = [
            self.directory.index(layer, expert)
            for layer, experts in enumerate(held)
            for expert in sorted(experts, key=frozenset(plan.hot_experts[layer]).__contains__)
        ]
        self.slot_of = {page: slot for slot, page in enumerate(pages)}
        self.first_page = _BLOCK + -(-8 * len(pages) // _BLOCK) * _BLOCK
        self.num_bytes = self.first_page + len(pages) * self.pages.num_bytes


class _RegionViews:
    """Views of a mapped region's parts."""

    def __init__(self, mapping: SharedMapping, layout: _RegionLayout) -> None:
        header = memoryview(mapping.memory)[:_BLOCK]
        self.words = header.cast("Q")
        num_pages = len(layout.slot_of)
        self.checksums = memoryview(mapping.memory)[_BLOCK : _BLOCK + 8 * num_pages].cast("q")
        self.pages = _as_tensor(mapping.memory, layout.first_page).view(num_pages, layout.pages.num_bytes)
        self._header = header

    def write_contents(self, contents: PoolContents) -> None:
        encoded = msgspec.msgpack.encode(contents)
        assert len(encoded) <= _BLOCK - 16, f"{len(encoded)=}"
        self.words[0] = len(encoded)
        self._header[8 : 8 + len(encoded)] = encoded

    def read_contents(self) -> PoolContents:
        encoded = self._header[8 : 8 + min(self.words[0], _BLOCK - 16)]
        try:
            return msgspec.msgpack.decode(encoded, type=PoolContents)
        except msgspec.MsgspecError as error:
            raise AttachError(f"not a pool region ({error})") from error


def _as_tensor(memory: mmap.mmap, offset: int) -> Tensor:
    """The memory from `offset` on as uint8, without a copy; keeps the memory mapped."""
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns; a write to such a mapping ends the process.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(memory, dtype=torch.uint8)[offset:]
