"""Staging: cold pages are copied to device slots before the computation reads them, or read in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from actors.expert_slots import ExpertSlots, SlotState
from actors.pinned_memory import PinnedMemory
from model.expert_source import ExpertPageError

_BATCH: Final = 16
"""Pages whose copies are started together."""

ReadPage = Callable[[int], Tensor]
"""Bytes of a page in host memory. Raises ExpertPageError if it is corrupt or cannot be read."""


class Copy(Protocol):
    """A copy under way."""

    def is_done(self) -> bool:
        """Whether it has ended, well or not; does not wait."""

    def join(self) -> None:
        """Whatever is computed from now on sees the copy's bytes.

        Raises: what reading the source raised; the target then holds nothing.
        """


class Copier(Protocol):
    """Copies beside the computation, in the order in which they are started."""

    def start(self, reads: Sequence[Callable[[], Tensor]], targets: Sequence[Tensor]) -> Sequence[Copy]:
        """Copy what each of `reads` returns to its target, once all computed so far is done with the targets.

        Returns: one copy for each target. A read that raises ExpertPageError spoils only its own.
        """

    def close(self) -> None:
        """Wait for the copies under way; nothing is started any more. Safe to call twice."""


def create_copier(device: torch.device, pinned: PinnedMemory | None = None) -> Copier:
    """The copier for targets on `device`; `pinned` is what most sources lie in, if there is such."""
    if device.type == "cpu":
        return ThreadCopier()
    return CudaCopier(device, () if pinned is None else pinned.chunk_starts)


class ThreadCopier:
    """CPU: one thread reads and copies. CPU operators return when they are done: nothing to wait for."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="expert-copies")

    def start(self, reads: Sequence[Callable[[], Tensor]], targets: Sequence[Tensor]) -> Sequence[Copy]:
        """See Copier."""
        pairs = zip(reads, targets, strict=True)
        return [_ThreadCopy(self._thread.submit(_read_into, target, read)) for read, target in pairs]

    def close(self) -> None:
        """See Copier."""
        self._thread.shutdown()


def _read_into(target: Tensor, read: Callable[[], Tensor]) -> None:
    target.copy_(read())


class _ThreadCopy:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_done(self) -> bool:
        return self._future.done()

    def join(self) -> None:
        self._future.result()


class CudaCopier:
    """CUDA: copies on streams of its own, ordered with the computing stream by events.

    `start` and `join` are called by the thread that computes, with its stream as the current one. `join` never makes
    the host wait; `start` does while a source is not registered with CUDA (6.5 GB/s, H200, PCIe 5.0 x16).

    Args:
        device: of the targets.
        boundaries: addresses at which no source may be copied together with what lies before it.
    """

    def __init__(self, device: torch.device, boundaries: Collection[int] = ()) -> None:
        self._device = device
        self._boundaries = frozenset(boundaries)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, reads: Sequence[Callable[[], Tensor]], targets: Sequence[Tensor]) -> Sequence[Copy]:
        """See Copier."""
        batch = _CudaBatch(self._device)
        copies: list[Copy] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        for read, target in zip(reads, targets, strict=True):
            try:
                pairs.append((read(), target))
            except ExpertPageError as error:
                copies.append(_FailedCopy(error))
            else:
                copies.append(batch)
        if pairs:
            runs = merge_runs(pairs, self._boundaries)
            # Whatever reads the targets' old bytes was enqueued before now, so this event comes after all of it.
            self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
            with torch.cuda.stream(self._stream):
                for source, target in runs:
                    target.copy_(source, non_blocking=True)
            batch.done = self._stream.record_event()
        return copies

    def close(self) -> None:
        """See Copier."""
        self._stream.synchronize()


def merge_runs(
    pairs: Sequence[tuple[Tensor, Tensor]], boundaries: Container[int] = ()
) -> list[tuple[Tensor, Tensor]]:
    """Copies of neighbours to neighbours as one copy: each costs the link some 5 us, as much as 250 KB.

    Args:
        pairs: source and target, `[page_bytes]` uint8 each.
        boundaries: addresses of sources that are not copied together with what lies before them.
    Returns: fewer, longer ones.
    """
    num_bytes = pairs[0][0].numel() if pairs else 0
    addresses = [(source.data_ptr(), target.data_ptr()) for source, target in pairs]
    merged: list[tuple[Tensor, Tensor]] = []
    start = 0
    for end in range(1, len(pairs) + 1):
        if end < len(pairs):
            (source, target), (next_source, next_target) = addresses[end - 1], addresses[end]
            are_neighbours = next_source == source + num_bytes and next_target == target + num_bytes
            if are_neighbours and next_source not in boundaries:
                continue
        merged += _as_one(pairs[start:end], (end - start) * num_bytes)
        start = end
    return merged


def _as_one(run: Sequence[tuple[Tensor, Tensor]], num_bytes: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Neighbours as one pair, if they are parts of the same memory for torch as well."""
    if len(run) == 1:
        return run
    source, target = run[0]
    for first in (source, target):
        if first.storage_offset() + num_bytes > first.untyped_storage().nbytes():
            return run
    return [(source.as_strided((num_bytes,), (1,)), target.as_strided((num_bytes,), (1,)))]


class _CudaBatch:
    """Copies that were started together and are joined together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.done: torch.cuda.Event | None = None
        """None once the computing stream waits for it."""

    def is_done(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    def join(self) -> None:
        if self.done is not None:
            torch.cuda.current_stream(self._device).wait_event(self.done)
            self.done = None


class _FailedCopy:
    def __init__(self, error: ExpertPageError) -> None:
        self._error = error

    def is_done(self) -> bool:
        return True

    def join(self) -> None:
        raise self._error


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch has started."""

    num_bytes: int = 0
    """That are copied."""
    num_evictions: int = 0
    """Other pages that lost their slot."""


class ColdPages(Protocol):
    """How pages without a resident slot are read.

    Protocol, for every page: `fetch`, later `join`, compute, `release`. The pages of the next computation
    are fetched before this one, so that they arrive meanwhile. A page whose `join` failed, or that is not
    needed after all, is released like any other.
    """

    @property
    def max_fetched(self) -> int:
        """Pages that may be fetched and not yet released."""

    def fetch(self, pages: Sequence[int]) -> Fetched:
        """Begin to make pages readable; what cannot be read shows when it is joined."""

    def join(self, page: int) -> int:
        """Address at which whatever is computed until `release` reads the page.

        Raises: ExpertPageError.
        """

    def release(self, page: int) -> None:
        """Nothing that is computed from now on reads the page."""

    def close(self) -> None:
        """No page is fetched any more; safe to call twice."""


class StagedPages:
    """Cold pages that pass through device slots.

    Invariant: a slot that is READY in ExpertSlots holds exactly the bytes of its page.

    Args:
        memory: `[num_slots, page_bytes]` uint8 on the computing device; what it holds is lost.
        read_page: from the pool.
        copier: for that device.
    """

    def __init__(self, memory: Tensor, read_page: ReadPage, copier: Copier) -> None:
        self._memory = memory
        self._targets = memory.unbind()
        self._addresses = [target.data_ptr() for target in self._targets]
        self._read_page = read_page
        self._copier = copier
        self._slots = ExpertSlots(len(memory))
        self._copies: dict[int, Copy] = {}
        """By page: those that are LOADING."""

    @property
    def max_fetched(self) -> int:
        """See ColdPages."""
        return len(self._memory)

    def fetch(self, pages: Sequence[int]) -> Fetched:
        """See ColdPages. A page that is in a slot already, or on its way to one, is not copied again."""
        num_evictions = self._slots.num_evictions
        num_copies = 0
        # A few at a time: the first ones cross the link while the others are looked up.
        for start in range(0, len(pages), _BATCH):
            num_copies += self._start(pages[start : start + _BATCH])
        return Fetched(num_copies * self._memory.shape[1], self._slots.num_evictions - num_evictions)

    def _start(self, pages: Sequence[int]) -> int:
        """Pin pages and start the copies of those that have no slot. Returns: how many."""
        leases = [(page, self._slots.acquire(page)) for page in pages]
        missing = [(page, self._targets[lease.slot]) for page, lease in leases if lease.must_load]
        reads = [partial(self._read_page, page) for page, _ in missing]
        copies = self._copier.start(reads, [target for _, target in missing])
        self._copies.update({page: copy for (page, _), copy in zip(missing, copies, strict=True)})
        return len(missing)

    def join(self, page: int) -> int:
        """See ColdPages."""
        copy = self._copies.pop(page, None)
        if copy is None:
            return self._addresses[self._slots.slot_of(page)]
        try:
            copy.join()
        except ExpertPageError:
            self._slots.fail_load(page)
            raise
        return self._addresses[self._slots.finish_load(page)]

    def release(self, page: int) -> None:
        """See ColdPages."""
        if page in self._copies:
            with contextlib.suppress(ExpertPageError):
                self.join(page)
        if self._slots.state_of(page) is not SlotState.FREE:
            self._slots.release(page)

    def close(self) -> None:
        """See ColdPages."""
        self._copier.close()

    def check_integrity(self) -> None:
        """Assert the invariants; for tests, while nothing computes."""
        self._slots.check_integrity()
        for page, slot in self._slots.ready_pages().items():
            assert torch.equal(self._memory[slot].cpu(), self._read_page(page)), f"{page=} {slot=}"


class DirectPages:
    """Cold pages that are read in host memory itself, where the device can.

    Args:
        read_page: from the pool, or from the checkpoint.
        num_pages: of the rank.
    """

    def __init__(self, read_page: ReadPage, num_pages: int) -> None:
        self._read_page = read_page
        self._num_pages = num_pages
        self._held: dict[int, Tensor] = {}
        """Until they are released: what is not in the pool has no other owner."""

    @property
    def max_fetched(self) -> int:
        """See ColdPages."""
        return 2 * self._num_pages  # no bound: a layer's pages and the next ones'

    def fetch(self, pages: Sequence[int]) -> Fetched:
        """See ColdPages."""
        return Fetched()

    def join(self, page: int) -> int:
        """See ColdPages."""
        self._held[page] = self._read_page(page)
        return self._held[page].data_ptr()

    def release(self, page: int) -> None:
        """See ColdPages."""
        self._held.pop(page, None)

    def close(self) -> None:
        """See ColdPages."""
