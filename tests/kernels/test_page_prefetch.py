"""Predicted pages are copied whole, the most wanted first, and the table says where each page is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.page_prefetch import MAX_PAIRS, prefetch_pages
from kernels.reference import page_prefetch as reference

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


class Case:
    """A layer with random pages, on one device."""

    def __init__(self, seed: int, num_local: int, num_slots: int, page_bytes: int, device: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        pages = torch.randint(0, 256, (num_local, page_bytes), dtype=torch.uint8, generator=generator)
        self.pages = pages.to(device)
        self.is_cold = (torch.rand(num_local, generator=generator) < 0.6).to(device)
        self.addresses = self.pages.data_ptr() + page_bytes * torch.arange(num_local, device=device)
        self.slots = torch.full((num_slots, page_bytes), 0xEE, dtype=torch.uint8, device=device)
        self.table = torch.full((num_local,), -1, dtype=torch.int64, device=device)
        self.was_prefetched = torch.ones(num_local, dtype=torch.bool, device=device)

    def prefetch(self, function, topk_idx, first_expert) -> None:
        function(
            topk_idx.to(self.pages.device),
            first_expert,
            self.is_cold,
            self.addresses,
            self.slots,
            self.table,
            self.was_prefetched,
        )

    def slot_of_expert(self) -> dict[int, int]:
        """Which slot the table names for each expert that it does not leave in place."""
        moved = (self.table != self.addresses).nonzero().flatten().tolist()
        offset = self.table - self.slots.data_ptr()
        return {expert: int(offset[expert]) // self.slots.shape[1] for expert in moved}


def random_topk(seed: int, num_tokens: int, num_topk: int, num_experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :num_topk].contiguous()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    ("num_local", "num_slots", "num_tokens"), [(48, 2, 6), (48, 1, 1), (16, 9, 170), (384, 8, 36), (3, 8, 0)]
)
def test_the_kernel_does_what_the_reference_says(num_local, num_slots, num_tokens, device):
    topk_idx = random_topk(1, num_tokens, 6, 384 if num_local == 384 else 64)
    cases = [Case(0, num_local, num_slots, 12 * 1024 + 16, device) for _ in range(2)]
    cases[0].prefetch(prefetch_pages, topk_idx, 8)
    cases[1].prefetch(reference.prefetch_pages, topk_idx, 8)
    assert cases[0].slot_of_expert() == cases[1].slot_of_expert()
    assert torch.equal(cases[0].was_prefetched, cases[1].was_prefetched)
    assert torch.equal(cases[0].slots, cases[1].slots)


@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 5), st.integers(0, 9), st.integers(0, 30))
@settings(deadline=None, max_examples=100)
def test_pages_are_cold_wanted_whole_and_never_more_than_slots(seed, num_local, num_slots, num_tokens, first):
    topk_idx = random_topk(seed, num_tokens, 3, 40)
    case = Case(seed, num_local, num_slots, 32, "cpu")
    case.prefetch(reference.prefetch_pages, topk_idx, first)
    counts = {e: int((topk_idx == first + e).sum()) for e in range(num_local)}
    slot_of_expert = case.slot_of_expert()
    assert set(slot_of_expert) == set(case.was_prefetched.nonzero().flatten().tolist())
    assert sorted(slot_of_expert.values()) == list(range(len(slot_of_expert)))
    candidates = [e for e in range(num_local) if case.is_cold[e] and counts[e]]
    assert len(slot_of_expert) == min(num_slots, len(candidates))
    left = [counts[e] for e in candidates if e not in slot_of_expert]
    assert all(counts[e] >= max(left, default=0) for e in slot_of_expert)
    for expert, slot in slot_of_expert.items():
        assert torch.equal(case.slots[slot], case.pages[expert])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_idx": torch.zeros(4, 2)}, "topk_idx must be contiguous torch.int64"),
        ({"topk_idx": torch.zeros(MAX_PAIRS + 1, 1, dtype=torch.int64)}, "more than 1024"),
        ({"table": torch.zeros(3, dtype=torch.int64)}, "table must have 4 elements"),
        ({"slots": torch.zeros(2, 24, dtype=torch.uint8)}, "aligned to 16 bytes"),
    ],
)
def test_what_the_kernel_cannot_use_is_refused_by_name(change, message):
    arguments = {
        "topk_idx": torch.zeros(1, 2, dtype=torch.int64),
        "first_expert": 0,
        "is_cold": torch.zeros(4, dtype=torch.bool),
        "addresses": torch.zeros(4, dtype=torch.int64),
        "slots": torch.zeros(2, 32, dtype=torch.uint8),
        "table": torch.zeros(4, dtype=torch.int64),
        "was_prefetched": torch.zeros(4, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        prefetch_pages(**(arguments | change))
