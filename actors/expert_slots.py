"""ExpertSlots: which page each staging slot holds, who needs it, which one goes next. Touches no memory.

FREE ──acquire──> LOADING ──finish_load──> READY
 ↑                   │                       │
 ├─────fail_load─────┘                       │
 └────────another page's acquire─────────────┘
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Final


class SlotState(IntEnum):
    """What a slot's bytes mean."""

    FREE = auto()
    """Nothing."""
    LOADING = auto()
    """A copy of the slot's page is under way."""
    READY = auto()
    """Exactly the bytes of the slot's page."""


_MOVES: Final = {
    SlotState.FREE: {SlotState.LOADING},
    SlotState.LOADING: {SlotState.READY, SlotState.FREE},
    SlotState.READY: {SlotState.FREE},
}


@dataclass(frozen=True, slots=True)
class Lease:
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
        self._slots = [_Slot() for _ in range(num_slots)]
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
        return {
            page: slot for page, slot in self._slot_of.items() if self._slots[slot].state is SlotState.READY
        }

    def state_of(self, page: int) -> SlotState:
        """State of the page's slot; FREE if it has none."""
        slot = self._slot_of.get(page)
        return SlotState.FREE if slot is None else self._slots[slot].state

    def acquire(self, page: int) -> Lease:
        """Pin `page` in a slot, in place of a page that nobody pins if no slot is free."""
        slot = self._slot_of.get(page)
        if slot is not None:
            self._evictable.pop(slot, None)
            self._slots[slot].num_pins += 1
            return Lease(slot, must_load=False)
        slot = self._take_free_slot()
        self._move(slot, SlotState.LOADING)
        self._slots[slot].page, self._slots[slot].num_pins = page, 1
        self._slot_of[page] = slot
        return Lease(slot, must_load=True)

    def finish_load(self, page: int) -> None:
        """The slot of `page` holds its bytes now."""
        slot = self._slot_of[page]
        self._move(slot, SlotState.READY)
        if not self._slots[slot].num_pins:
            self._evictable[slot] = None

    def fail_load(self, page: int) -> None:
        """`page` could not be read: forget it and its pins, which are not released any more."""
        self._free_slot(self._slot_of[page])

    def release(self, page: int) -> None:
        """Drop one pin of `page`."""
        slot = self._slot_of[page]
        held = self._slots[slot]
        assert held.num_pins > 0, f"{page=} {held=}"
        held.num_pins -= 1
        if not held.num_pins and held.state is SlotState.READY:
            self._evictable[slot] = None

    def check_integrity(self) -> None:
        """Assert the invariants that bookkeeping can show."""
        for slot, held in enumerate(self._slots):
            is_free = held.state is SlotState.FREE
            assert is_free == (held.page is None) == (slot in self._free), f"{slot=} {held=} {self._free=}"
            assert not (is_free and held.num_pins), f"{slot=} {held=}"
            can_go = held.state is SlotState.READY and not held.num_pins
            assert can_go == (slot in self._evictable), f"{slot=} {held=} {self._evictable=}"
        pages = {held.page: slot for slot, held in enumerate(self._slots) if held.page is not None}
        assert pages == self._slot_of, f"{pages=} {self._slot_of=}"
        assert len(self._free) == len(set(self._free)), f"{self._free=}"

    def _take_free_slot(self) -> int:
        if not self._free:
            assert self._evictable, f"every slot is loading or pinned: {self._slots}"
            self._free_slot(next(iter(self._evictable)))
            self.num_evictions += 1
        return self._free.popleft()

    def _free_slot(self, slot: int) -> None:
        page = self._slots[slot].page
        assert page is not None, f"{slot=}"
        self._move(slot, SlotState.FREE)
        self._slots[slot] = _Slot()
        del self._slot_of[page]
        self._evictable.pop(slot, None)
        self._free.append(slot)

    def _move(self, slot: int, state: SlotState) -> None:
        current = self._slots[slot].state
        assert state in _MOVES[current], f"{slot=}: {current!r} -> {state!r}"
        self._slots[slot].state = state


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.FREE
    page: int | None = None
    num_pins: int = 0
