import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.expert_slots import ExpertSlots, SlotState

NUM_SLOTS = 4
PAGES = st.integers(0, 9)


class SlotsUnderRandomUse(RuleBasedStateMachine):
    """Drives ExpertSlots beside a plain record of what every slot holds, who pins it and when it was
    released."""

    def __init__(self):
        super().__init__()
        self.slots = ExpertSlots(NUM_SLOTS)
        self.slot_of: dict[int, int] = {}
        self.loading: set[int] = set()
        self.pins: dict[int, int] = {}
        self.released: list[int] = []

    @property
    def num_taken(self):
        return sum(1 for page in self.slot_of if self.pins[page] or page in self.loading)

    @rule(page=PAGES)
    def acquire(self, page):
        if page not in self.slot_of and self.num_taken == NUM_SLOTS:
            with pytest.raises(AssertionError, match="loading or pinned"):
                self.slots.acquire(page)
            return
        oldest = next((p for p in self.released if p in self.slot_of), None)
        lease = self.slots.acquire(page)
        assert lease.must_load == (page not in self.slot_of)
        if lease.must_load:
            evicted = [p for p, slot in self.slot_of.items() if slot == lease.slot]
            assert evicted in ([], [oldest])
            for other in evicted:
                del self.slot_of[other]
                del self.pins[other]
            self.loading.add(page)
        else:
            assert lease.slot == self.slot_of[page]
        self.slot_of[page] = lease.slot
        self.pins[page] = self.pins.get(page, 0) + 1
        self.released = [p for p in self.released if p != page and p in self.slot_of]

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def finish_load(self, data):
        page = data.draw(st.sampled_from(sorted(self.loading)))
        self.slots.finish_load(page)
        self.loading.remove(page)
        if not self.pins[page]:
            self.released.append(page)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def fail_load(self, data):
        page = data.draw(st.sampled_from(sorted(self.loading)))
        self.slots.fail_load(page)
        self.loading.remove(page)
        del self.slot_of[page]
        del self.pins[page]

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from(sorted(p for p, count in self.pins.items() if count)))
        self.slots.release(page)
        self.pins[page] -= 1
        if not self.pins[page] and page not in self.loading:
            self.released.append(page)

    @invariant()
    def bookkeeping_agrees(self):
        self.slots.check_integrity()
        assert len(set(self.slot_of.values())) == len(self.slot_of)
        for page in range(10):
            expected = SlotState.LOADING if page in self.loading else SlotState.READY
            assert self.slots.state_of(page) is (expected if page in self.slot_of else SlotState.FREE)


SlotsUnderRandomUse.TestCase.settings = settings(deadline=None)
TestSlotsUnderRandomUse = SlotsUnderRandomUse.TestCase


def test_a_page_that_is_not_loading_cannot_finish():
    slots = ExpertSlots(1)
    slots.acquire(7)
    slots.finish_load(7)
    with pytest.raises(AssertionError, match="READY"):
        slots.finish_load(7)
