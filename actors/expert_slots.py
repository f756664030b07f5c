"""ExpertSlots: which page each staging slot holds, who needs it, which one goes next. Touches no memory.

FREE ──acquire──> LOADING ──finish_load──> READY
 ↑                   │                       │
 ├─────fail_load─────┘                       │
 └────────another page's acquire─────────────┘
"""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import IntEnum, auto
from typing import Final, NamedTuple


class SlotState(IntEnum):
    """What a slot's bytes mean."""

    FREE = auto()
    """Nothing."""
    LOADING = auto()
    """A copy of the slot's page is under way."""
    READY = auto()
    """Exactly the bytes of the slot's page."""


_MOVES: Final = {
    (SlotState.FREE, SlotState.LOADING),
    (SlotState.LOADING, SlotState.READY),
    (SlotState.LOADING, SlotState.FREE),
    (SlotState.READY, SlotState.FREE),
}


class Lease(NamedTuple):
    """A pinned page: where it is, and whether the caller has to load it."""

    slot: int
    must_load: bool


class ExpertSlots:
    """Bookkeeping of `num_slots` page-sized slots.

    Protocol: `acquire` pins a page in a slot and says whether its bytes must be copied there; the caller
    then copies and reports `finish_load` or `fail_load`. Every other `acquire` is paired with one `release`.
    A page that nobody pins stays until its slot is needed; the one released longest ago goes first.

    Invariants:
    - a slot in READY holds exactly the bytes of its page; nobody reads a FREE or LOADING slot;
    - a page has at most one slot, so it is never fetched twice at once;
    - a slot that is LOADING or pinned is never given to another page.
    """

    def __init__(self, num_slots: int) -> None:
        # A list for each field: a prefill of slices comes here some thousand times a layer.
        self._states = [SlotState.FREE] * num_slots
        self._pages: list[int | None] = [None] * num_slots
        self._num_pins = [0] * num_slots
        self._slot_of: dict[int, int] = {}
        self._free = deque(range(num_slots))
        """Taken from the left: pages that come one after the other get slots side by side."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Slots that are READY and not pinned, released longest ago first."""
        self.num_evictions = 0
        """Pages that lost their slot to another one, since start."""

    def slot_of(self, page: int) -> int:
        """Slot of a page that has one."""
        return self._slot_of[page]

    def ready_pages(self) -> dict[int, int]:
        """Slot of every page that is READY."""
        return {page: slot for page, slot in self._slot_of.items() if self._states[slot] is SlotState.READY}

    def state_of(self, page: int) -> SlotState:
        """State of the page's slot; FREE if it has none."""
        slot = self._slot_of.get(page)
        return SlotState.FREE if slot is None else self._states[slot]

    def acquire(self, page: int) -> Lease:
        """Pin `page` in a slot, in place of a page that nobody pins if no slot is free."""
        slot = self._slot_of.get(page)
        if slot is not None:
            self._evictable.pop(slot, None)
            self._num_pins[slot] += 1
            return Lease(slot, must_load=False)
        if not self._free:
            self._evict()
        slot = self._free.popleft()
        self._move(slot, SlotState.LOADING)
        self._pages[slot] = page
        self._num_pins[slot] = 1
        self._slot_of[page] = slot
        return Lease(slot, must_load=True)

    def finish_load(self, page: int) -> int:
        """The slot of `page` holds its bytes now. Returns: the slot."""
        slot = self._slot_of[page]
        self._move(slot, SlotState.READY)
        if not self._num_pins[slot]:
            self._evictable[slot] = None
        return slot

    def fail_load(self, page: int) -> None:
        """`page` could not be read: forget it and its pins, which are not released any more."""
        self._free_slot(self._slot_of[page])

    def release(self, page: int) -> None:
        """Drop one pin of `page`."""
        slot = self._slot_of[page]
        assert self._num_pins[slot] > 0, f"{page=} {slot=}"
        self._num_pins[slot] -= 1
        if not self._num_pins[slot] and self._states[slot] is SlotState.READY:
            self._evictable[slot] = None

    def check_integrity(self) -> None:
        """Assert the invariants that bookkeeping can show."""
        for slot, (state, page, num_pins) in enumerate(
            zip(self._states, self._pages, self._num_pins, strict=True)
        ):
            is_free = state is SlotState.FREE
            assert is_free == (page is None) == (slot in self._free), (
                f"{slot=} {state=} {page=} {self._free=}"
            )
            assert not (is_free and num_pins), f"{slot=} {num_pins=}"
            can_go = state is SlotState.READY and not num_pins
            assert can_go == (slot in self._evictable), f"{slot=} {state=} {num_pins=} {self._evictable=}"
        pages = {page: slot for slot, page in enumerate(self._pages) if page is not None}
        assert pages == self._slot_of, f"{pages=} {self._slot_of=}"
        assert len(self._free) == len(set(self._free)), f"{self._free=}"

    def _evict(self) -> None:
        assert self._evictable, f"every slot is loading or pinned: {self._states} {self._num_pins}"
        self._free_slot(next(iter(self._evictable)))
        self.num_evictions += 1

    def _free_slot(self, slot: int) -> None:
        page = self._pages[slot]
        assert page is not None, f"{slot=}"
        self._move(slot, SlotState.FREE)
        self._pages[slot] = None
        self._num_pins[slot] = 0
        del self._slot_of[page]
        self._evictable.pop(slot, None)
        self._free.append(slot)

    def _move(self, slot: int, state: SlotState) -> None:
        current = self._states[slot]
        assert (current, state) in _MOVES, f"{slot=}: {current!r} -> {state!r}"
        self._states[slot] = state
