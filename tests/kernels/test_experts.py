"""Routed experts read from MXFP4 pages (spec sections 2.2 and 6)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.formats import PageLayout
from kernels.reference.expert_pages import store_codes, store_scales
from kernels.reference.experts import expert_mlp, read_page, swiglu, view_memory
from kernels.reference.quantize import encode_mxfp4, quantize_q8
from tests.kernels.builders import (
    ACCUMULATE,
    NUM_ROWS,
    Array,
    assert_bit_equal,
    assert_rows_are_independent,
    bf16,
    generator,
    normal,
    numpy,
    strided,
)

HIDDEN, INTER, NUM_EXPERTS, NUM_TOPK = 64, 32, 5, 2
LAYOUT = PageLayout(HIDDEN, INTER)
UNTOUCHED = 123.0

accumulate_types = pytest.mark.parametrize("accumulate", ACCUMULATE)
activations = pytest.mark.parametrize("quantize_activations", [True, False])


class Experts:
    """Pages of random experts, and the weights that they hold."""

    def __init__(self, std: float = 0.2) -> None:
        shapes = {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN), "down": (HIDDEN, INTER)}
        encoded = {
            name: [
                encode_mxfp4(normal(*shape, seed=(name, e), dtype=torch.float32, std=std))
                for e in range(NUM_EXPERTS)
            ]
            for name, shape in shapes.items()
        }
        self.pages = [
            pack_page(*matrices)
            for matrices in zip(encoded["gate"], encoded["up"], encoded["down"], strict=True)
        ]
        self.addresses = torch.tensor([page.data_ptr() for page in self.pages])
        self.gate, self.up, self.down = (
            [dequantize(*pair) for pair in encoded[name]] for name in ("gate", "up", "down")
        )


def pack_page(*matrices: tuple[Tensor, Tensor]) -> Tensor:
    """A page of codes and scales of gate, up and down."""
    page = torch.empty(LAYOUT.num_bytes, dtype=torch.uint8)
    sections = (
        (LAYOUT.gate_codes, LAYOUT.gate_scales),
        (LAYOUT.up_codes, LAYOUT.up_scales),
        (LAYOUT.down_codes, LAYOUT.down_scales),
    )
    for (codes, scales), (code_section, scale_section) in zip(matrices, sections, strict=True):
        store_codes(page[code_section], codes)
        store_scales(page[scale_section], scales)
    return page


def dequantize(codes: Tensor, scales: Tensor) -> Array:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    raw = codes.numpy()
    elements = values[np.stack((raw & 15, raw >> 4), axis=-1).reshape(len(raw), -1)]
    weight: Array = elements * np.exp2(scales.numpy().astype(np.float64) - 127).repeat(32, axis=1)
    return weight


def choices(num_tokens: int, accumulate: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two different experts for each token, ascending, and their weights."""
    order = torch.rand(num_tokens, NUM_EXPERTS, generator=generator(num_tokens)).argsort(dim=1)
    topk_idx = order[:, :NUM_TOPK].sort(dim=1).values
    return topk_idx, normal(num_tokens, NUM_TOPK, seed="weights", dtype=accumulate).abs()


def run(
    experts: Experts,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    quantize_activations: bool = True,
    local: range | list[int] = range(NUM_EXPERTS),
    first_expert: int = 0,
) -> Tensor:
    """`expert_mlp` into an output that starts as `UNTOUCHED`, with the clamp of the released model."""
    out = topk_weights.new_full((*topk_idx.shape, HIDDEN), UNTOUCHED)
    expert_mlp(
        x,
        topk_idx,
        topk_weights,
        experts.addresses,
        local,
        first_expert,
        LAYOUT,
        out,
        limit=10.0,
        quantize_activations=quantize_activations,
    )
    return out


def naive(
    experts: Experts, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, quantize_activations: bool
) -> Array:
    """The formulas of section 6 in FP64, token by token."""
    rounded = quantize_q8 if quantize_activations else torch.clone
    out = np.empty((*topk_idx.shape, HIDDEN))
    for token in range(len(x)):
        for choice in range(NUM_TOPK):
            e, p = int(topk_idx[token, choice]), topk_weights[token, choice].item()
            row = numpy(rounded(x[token]))
            g = np.minimum(bf16(experts.gate[e] @ row), 10)
            u = np.clip(bf16(experts.up[e] @ row), -10, 10)
            h = torch.from_numpy(bf16(g / (1 + np.exp(-g)) * u * p)).to(torch.bfloat16)
            out[token, choice] = experts.down[e] @ numpy(rounded(h))
    return out


@activations
@pytest.mark.parametrize("std", [0.2, 2.0])
def test_outputs_follow_the_formula(quantize_activations: bool, std: float) -> None:
    experts, x = Experts(std), normal(30, HIDDEN)
    topk_idx, topk_weights = choices(30, torch.float64)
    expected = naive(experts, x, topk_idx, topk_weights, quantize_activations)
    out = run(experts, x, topk_idx, topk_weights, quantize_activations)
    assert numpy(out) == pytest.approx(expected, rel=1e-11, abs=1e-11 * np.abs(expected).max())


@activations
def test_float32_differs_by_roundings_only(quantize_activations: bool) -> None:
    experts, x = Experts(), normal(30, HIDDEN)
    topk_idx, topk_weights = choices(30, torch.float32)
    expected = naive(experts, x, topk_idx, topk_weights, quantize_activations)
    actual = numpy(run(experts, x, topk_idx, topk_weights, quantize_activations))
    # A rounding to FP8 that flips moves one of the 32 inputs of the last product by a sixteenth at most.
    assert np.abs(actual - expected).max() <= np.abs(expected).max() / 16
    assert (np.abs(actual - expected) > 1e-5 * np.abs(expected).max()).mean() < 0.05


@accumulate_types
def test_the_gate_is_clamped_from_above_only_and_up_on_both_sides(accumulate: torch.dtype) -> None:
    gate = torch.tensor([30.0, 10.0, -30.0, 1.0, 1.0], dtype=torch.bfloat16)
    up = torch.tensor([1.0, 1.0, 1.0, 30.0, -30.0], dtype=torch.bfloat16)
    silu = [g / (1 + math.exp(-g)) for g in (10, 10, -30, 1, 1)]
    expected = [s * u for s, u in zip(silu, (1, 1, 1, 10, -10), strict=True)]
    actual = swiglu(gate, up, 10.0, accumulate)
    assert actual.dtype == accumulate
    assert actual.tolist() == pytest.approx(expected, rel=4 * torch.finfo(accumulate).eps)


@accumulate_types
def test_the_routing_weight_multiplies_before_the_last_rounding(accumulate: torch.dtype) -> None:
    experts, x = Experts(), normal(1, HIDDEN)
    topk_idx = torch.tensor([[0, 3]])
    ones, thirds = (torch.full((1, 2), value, dtype=accumulate) for value in (1.0, 1 / 3))
    after = run(experts, x, topk_idx, ones, quantize_activations=False) / 3
    before = run(experts, x, topk_idx, thirds, quantize_activations=False)
    # Close, but the input of the down product was rounded at another place.
    assert 0 < (before - after).abs().max() < 2**-7 * after.abs().max()


@accumulate_types
@activations
def test_only_the_listed_experts_write_and_only_their_choices(
    accumulate: torch.dtype, quantize_activations: bool
) -> None:
    experts, x = Experts(), normal(20, HIDDEN)
    topk_idx, topk_weights = choices(20, accumulate)
    whole = run(experts, x, topk_idx, topk_weights, quantize_activations)
    part = run(experts, x, topk_idx, topk_weights, quantize_activations, local=[1, 4])
    is_local = ((topk_idx == 1) | (topk_idx == 4)).unsqueeze(-1)
    assert_bit_equal(part, torch.where(is_local, whole, UNTOUCHED))


@accumulate_types
def test_local_experts_are_counted_from_the_first(accumulate: torch.dtype) -> None:
    experts, x = Experts(), normal(20, HIDDEN)
    topk_idx, topk_weights = choices(20, accumulate)
    whole = run(experts, x, topk_idx, topk_weights)
    assert_bit_equal(run(experts, x, topk_idx + 40, topk_weights, first_expert=40), whole)
    # Another rank's experts are nobody's here.
    assert (run(experts, x, topk_idx, topk_weights, first_expert=40) == UNTOUCHED).all()


def test_the_page_of_an_expert_without_rows_is_not_read() -> None:
    experts, x = Experts(), normal(4, HIDDEN)
    topk_idx, topk_weights = torch.tensor([[0, 3]] * 4), torch.ones(4, 2)
    expected = run(experts, x, topk_idx, topk_weights)
    experts.addresses[[1, 2, 4]] = 0
    assert_bit_equal(run(experts, x, topk_idx, topk_weights), expected)


@accumulate_types
@activations
def test_a_row_does_not_depend_on_the_rows_beside_it(
    accumulate: torch.dtype, quantize_activations: bool
) -> None:
    experts, x = Experts(), normal(NUM_ROWS, HIDDEN)
    topk_idx, topk_weights = choices(NUM_ROWS, accumulate)
    assert_rows_are_independent(
        lambda x, topk_idx, topk_weights: run(experts, x, topk_idx, topk_weights, quantize_activations),
        *(x, topk_idx, topk_weights),
        spoil=[0, 2],
    )


@accumulate_types
def test_inputs_may_have_any_strides_and_no_rows(accumulate: torch.dtype) -> None:
    experts, x = Experts(), normal(6, HIDDEN)
    topk_idx, topk_weights = choices(6, accumulate)
    expected = run(experts, x, topk_idx, topk_weights)
    assert_bit_equal(run(experts, strided(x), strided(topk_idx), strided(topk_weights)), expected)
    assert run(experts, x[:0], topk_idx[:0], topk_weights[:0]).shape == (0, NUM_TOPK, HIDDEN)
    assert (run(experts, x, topk_idx, topk_weights, local=[]) == UNTOUCHED).all()


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_a_page_may_lie_at_any_address(offset: int) -> None:
    experts = Experts()
    memory = torch.zeros(LAYOUT.num_bytes + offset, dtype=torch.uint8)
    memory[offset:] = experts.pages[2]
    gate, up, down = read_page(memory.data_ptr() + offset, LAYOUT, memory.device)
    for actual, expected in ((gate, experts.gate[2]), (up, experts.up[2]), (down, experts.down[2])):
        assert actual.dtype == torch.float32
        assert np.array_equal(numpy(actual), expected)


def test_viewed_memory_is_the_memory_itself() -> None:
    memory = torch.arange(100, dtype=torch.uint8)
    view = view_memory(memory.data_ptr() + 10, 5, memory.device)
    memory[12] = 200
    assert view.tolist() == [10, 11, 200, 13, 14]


@accumulate_types
def test_the_down_product_is_left_in_the_accumulation_type(accumulate: torch.dtype) -> None:
    experts, x = Experts(), normal(3, HIDDEN)
    topk_idx, topk_weights = choices(3, accumulate)
    out = run(experts, x, topk_idx, topk_weights)
    assert out.dtype == accumulate
    assert not torch.equal(out, out.to(torch.bfloat16).to(accumulate))
