"""The expert kernels on a GPU: against FP64, and the same bits whatever the slots, the memory and the routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.formats import PageLayout
from kernels.reference.experts import expert_mlp as reference
from tests.kernels.builders import assert_bit_equal

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


class Case:
    """Random pages, inputs and routing on the GPU; all experts are local."""

    def __init__(self, inter: int, num_experts: int, num_tokens: int, hidden: int = 5120, num_topk: int = 6):
        self.layout = PageLayout(hidden, inter)
        torch.manual_seed(hidden + inter + num_experts + num_tokens)
        size = (num_experts, self.layout.num_bytes)
        self.pages = torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE)
        for part in (self.layout.gate_scales, self.layout.up_scales, self.layout.down_scales):
            self.pages[:, part] = torch.randint_like(self.pages[:, part], 116, 122)
        self.x = torch.randn(num_tokens, hidden, device=DEVICE).to(torch.bfloat16)
        order = torch.rand(num_tokens, num_experts, device=DEVICE).argsort(dim=1)
        self.topk_idx = order[:, :num_topk].sort(dim=1).values.contiguous()
        self.topk_weights = torch.rand(self.topk_idx.shape, device=DEVICE)

    def addresses(self, pages: Tensor | None = None) -> Tensor:
        pages = self.pages if pages is None else pages
        return torch.tensor([page.data_ptr() for page in pages], device=DEVICE)

    def run(self, addresses: Tensor | None = None, experts: list[int] | None = None) -> Tensor:
        from kernels.experts import expert_mlp

        shape = (*self.topk_idx.shape, self.layout.hidden_size)
        out = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
        is_member = None
        if experts is not None:
            is_member = torch.isin(
                torch.arange(len(self.pages), device=DEVICE), torch.tensor(experts, device=DEVICE)
            )
        expert_mlp(
            self.x,
            self.topk_idx,
            self.topk_weights,
            self.addresses() if addresses is None else addresses,
            is_member,
            0,
            self.layout,
            out,
            num_experts=len(self.pages),
            limit=10.0,
        )
        return out

    def expected(self, experts: list[int] | None = None) -> Tensor:
        weights = self.topk_weights.double()
        out = weights.new_zeros(*self.topk_idx.shape, self.layout.hidden_size)
        experts = list(range(len(self.pages))) if experts is None else experts
        reference(
            self.x,
            self.topk_idx,
            weights,
            self.addresses(),
            experts,
            0,
            self.layout,
            out,
            limit=10.0,
            quantize_activations=False,
        )
        return out


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("inter", [2304, 1152, 576, 288, 32])
@pytest.mark.parametrize("num_tokens", [1, 6, 30, 48, 300, 1000])
def test_outputs_agree_with_fp64(inter: int, num_tokens: int) -> None:
    case = Case(inter, num_experts=12, num_tokens=num_tokens)
    assert relative_error(case.run(), case.expected()) < 4e-3


WIDTHS = [32, 64, 96, 128, 160, 256, 416, 576, 864]


@pytest.mark.parametrize("num_tokens", [5, 200])
@pytest.mark.parametrize("inter", WIDTHS)
def test_every_split_into_wide_and_narrow_tiles_works(inter: int, num_tokens: int) -> None:
    case = Case(inter, num_experts=3, num_tokens=num_tokens, hidden=256 + inter % 256, num_topk=2)
    assert relative_error(case.run(), case.expected()) < 4e-3


def test_rows_with_outliers_agree_with_fp64() -> None:
    case = Case(288, num_experts=12, num_tokens=20)
    case.x[3] *= 100
    case.x[7, 11] *= 100
    assert relative_error(case.run(), case.expected()) < 4e-3


def test_383_experts_and_a_part_of_them() -> None:
    case = Case(32, num_experts=383, num_tokens=200, hidden=512)
    assert relative_error(case.run(), case.expected()) < 4e-3
    some = [0, 17, 200, 382]
    assert relative_error(case.run(experts=some), case.expected(some)) < 4e-3


def test_one_expert_may_take_all_rows() -> None:
    case = Case(288, num_experts=5, num_tokens=100, num_topk=1)
    case.topk_idx.fill_(3)
    assert relative_error(case.run(), case.expected()) < 4e-3


@pytest.mark.parametrize(
    ("num_tokens", "parts"),
    [
        (12, [slice(0, 1), slice(5, 12), slice(2, 10)]),
        (700, [slice(0, 100), slice(50, 300), slice(200, 700)]),
    ],
)
@pytest.mark.parametrize("inter", [2304, 288])
def test_a_row_has_the_same_bits_in_every_batch(inter: int, num_tokens: int, parts: list[slice]) -> None:
    """Of few rows an expert, and of many: those are two products."""
    case = Case(inter, num_experts=8, num_tokens=num_tokens)
    whole = case.run()
    for part in parts:
        alone = Case(inter, num_experts=8, num_tokens=num_tokens)
        alone.x, alone.topk_idx = alone.x[part], alone.topk_idx[part]
        alone.topk_weights = alone.topk_weights[part]
        assert_bit_equal(alone.run().cpu(), whole[part].cpu())


@pytest.mark.parametrize("num_tokens", [9, 300])
def test_slots_memory_and_repetition_change_no_bit(num_tokens: int) -> None:
    case = Case(288, num_experts=16, num_tokens=num_tokens)
    expected = case.run().cpu()
    assert_bit_equal(case.run().cpu(), expected)
    order = torch.randperm(16, device=DEVICE)
    slots = torch.empty_like(case.pages)
    slots[order] = case.pages
    assert_bit_equal(case.run(case.addresses(slots)[order]).cpu(), expected)
    mapped = case.pages.cpu().pin_memory()  # a pinned page has the same address on the device
    assert_bit_equal(case.run(case.addresses(mapped)).cpu(), expected)
    parts = torch.zeros_like(case.run())
    for experts in (range(5), range(5, 6), range(6, 16)):  # as staging splits a step
        parts += case.run(experts=list(experts))
    assert_bit_equal(parts.cpu(), expected)


@pytest.mark.parametrize("num_tokens", [6, 200])
def test_a_graph_follows_other_routing_and_other_addresses(num_tokens: int) -> None:
    case = Case(288, num_experts=32, num_tokens=num_tokens)
    addresses, topk_idx = case.addresses(), case.topk_idx.clone()
    case.run(addresses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(addresses)
    for seed in range(3):
        torch.manual_seed(seed)
        case.topk_idx.copy_(
            torch.rand(num_tokens, 32, device=DEVICE).argsort(dim=1)[:, :6].sort(dim=1).values
        )
        moved = case.pages.clone()
        addresses.copy_(case.addresses(moved))
        graph.replay()
        assert_bit_equal(out.cpu(), case.run().cpu())
    assert not torch.equal(topk_idx, case.topk_idx)


def test_nothing_and_nobody() -> None:
    case = Case(32, num_experts=4, num_tokens=3, hidden=64, num_topk=2)
    assert (case.run(experts=[]) == 0).all()
    case.x, case.topk_idx, case.topk_weights = case.x[:0], case.topk_idx[:0], case.topk_weights[:0]
    assert case.run().shape == (0, 2, 64)


def test_bad_input_is_refused_by_name() -> None:
    def refused(name: str, **changes: Tensor) -> None:
        case = Case(32, num_experts=4, num_tokens=3, hidden=64, num_topk=2)
        table = changes.pop("addresses", case.addresses())
        for key, value in changes.items():
            setattr(case, key, value)
        with pytest.raises(ValueError, match=name):
            case.run(table, experts=[0, 1, 2, 3])

    good = Case(32, num_experts=4, num_tokens=3, hidden=64, num_topk=2)
    refused("x must be torch.bfloat16", x=good.x.float())
    refused("x must be contiguous", x=good.x.repeat(1, 2)[:, ::2])
    refused("topk_idx must be torch.int64", topk_idx=good.topk_idx.int())
    refused("topk_weights must have shape", topk_weights=good.topk_weights[:2])
    refused("addresses must be torch.int64", addresses=good.addresses().int())


def test_combine_adds_local_choices_in_order() -> None:
    from kernels.expert_rows import combine

    parts = torch.randn(7, 6, 5120, device=DEVICE).to(torch.bfloat16)
    topk_idx = torch.rand(7, 20, device=DEVICE).argsort(dim=1)[:, :6].sort(dim=1).values
    expected = torch.zeros(7, 5120, device=DEVICE)
    for choice in range(6):
        is_local = ((topk_idx[:, choice] >= 3) & (topk_idx[:, choice] < 15)).unsqueeze(1)
        expected = torch.where(is_local, expected + parts[:, choice], expected)
    assert_bit_equal(combine(parts, topk_idx, range(3, 15)).cpu(), expected.cpu())
