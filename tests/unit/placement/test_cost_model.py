import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.formats import PageLayout
from placement.constants import (
    EXPERT_BYTES,
    LAYER_RANK_BYTES,
    NUM_RANKS,
    PUBLISHED_MACHINE,
    RANK_EXPERT_BYTES,
)
from placement.cost_model import (
    Loads,
    combine,
    hot_ms,
    layer_ms,
    link_ms,
    other_ms,
    page_bytes,
    step_cost,
    wait_ms,
)

MACHINE = PUBLISHED_MACHINE
EP_SIZES = (1, 2, 4, 8)


def create_loads(hot, cold, foreseen=None, mistaken=None) -> Loads:
    """From pages by layer and group, of one step."""
    arrays = [hot, cold, foreseen or np.zeros_like(cold), mistaken or np.zeros_like(cold)]
    return Loads(*(np.array([array], float) for array in arrays))


def test_every_constant_says_where_it_comes_from():
    for name, constant in MACHINE.constants().items():
        assert constant.unit, name
        assert len(constant.source) > 20, name
        assert constant.value > 0, name


def test_pages_have_the_bytes_of_their_layout():
    for ep_size in EP_SIZES:
        assert page_bytes(ep_size) == PageLayout(5120, 2304 * ep_size // NUM_RANKS).num_bytes
    assert RANK_EXPERT_BYTES * NUM_RANKS == 288_777_830_400  # spec section 11
    assert LAYER_RANK_BYTES == 48 * EXPERT_BYTES


def test_a_cold_expert_comes_over_one_link_or_over_all():
    one_link = link_ms(MACHINE, np.eye(8)[0], 8)
    all_links = link_ms(MACHINE, np.ones(1), 1)
    # Design section 5: 18.8 MB at 51.3 and at 260 GB/s.
    assert one_link == pytest.approx(0.3665, abs=1e-3)
    assert all_links == pytest.approx(0.0723, abs=1e-4)


def test_eight_ranks_share_what_the_host_gives_until_the_first_is_done():
    loads = np.array([4.0, 1, 1, 1, 1, 1, 1, 1])
    shared_ms = EXPERT_BYTES / 260e9 * 8 * 1e3
    alone_ms = 3 * EXPERT_BYTES / 51.3e9 * 1e3
    assert link_ms(MACHINE, loads, 8) == pytest.approx(shared_ms + alone_ms)


@given(st.lists(st.integers(0, 48), min_size=8, max_size=8).map(np.array))
def test_the_links_are_never_faster_than_either_limit(loads):
    loads = loads.astype(float)
    time_s = link_ms(MACHINE, loads, 8) / 1e3
    total, most = loads.sum() * EXPERT_BYTES, loads.max() * EXPERT_BYTES
    assert time_s >= max(total / 260e9, most / 51.3e9) * (1 - 1e-12)
    assert time_s <= total / 51.3e9 * (1 + 1e-12)
    # Slices balance exactly.
    sliced_s = link_ms(MACHINE, loads.sum(keepdims=True), 1) / 1e3
    assert sliced_s == pytest.approx(total / 260e9)
    assert sliced_s <= time_s * (1 + 1e-12)


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 7))
def test_one_more_page_is_never_faster(loads, rank):
    more = [count + (i == rank) for i, count in enumerate(loads)]
    for times in (link_ms, wait_ms, hot_ms):
        before_ms, after_ms = (float(times(MACHINE, np.array(pages, float), 8)) for pages in (loads, more))
        assert after_ms >= before_ms * (1 - 1e-12)


def test_a_layer_without_cold_pages_waits_for_nothing():
    assert wait_ms(MACHINE, np.zeros(8), 8) == 0
    assert wait_ms(MACHINE, np.eye(8)[0], 8) == pytest.approx(link_ms(MACHINE, np.eye(8)[0], 8) + 0.03)


def test_reads_follow_each_other_or_overlap():
    hot, cold = np.array([1.0, 3.0]), np.array([2.0, 2.0])
    assert combine(hot, cold, overlaps=False).tolist() == [3, 5]
    assert combine(hot, cold, overlaps=True).tolist() == [2, 3]


def test_six_rows_cost_the_base_time_and_more_rows_more():
    assert other_ms(MACHINE, 15.0, 6) == 17.0
    assert other_ms(MACHINE, 15.0, 1006) == pytest.approx(17.0 + 83.6)


def test_a_prefetch_fills_the_window_and_no_more():
    loads = create_loads([[9.0]], [[5.0]], foreseen=[[4.0]], mistaken=[[2.0]])
    page_ms = float(link_ms(MACHINE, np.ones(1), 1, copied=True))
    assert page_ms == pytest.approx(18.80064 / 260)
    waits = [layer_ms(MACHINE, loads, w * page_ms, use_prefetch=True)[1][0, 0] - 0.03 for w in (0, 3, 6, 60)]
    # A third of what is asked for is mistaken, so three pages of copies save two.
    assert np.array(waits) / page_ms == pytest.approx([5, 3, 1, 1])
    without = layer_ms(MACHINE, loads, 60 * page_ms)[1][0, 0] - 0.03
    assert without / page_ms == pytest.approx(5)


@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_the_same_experts_are_the_same_bytes_in_every_layout(ep_size):
    by_expert = np.arange(16.0).reshape(1, 1, 16)
    groups = by_expert.reshape(1, 1, ep_size, -1).sum(axis=3)
    zero = np.zeros_like(groups)
    cost = step_cost(MACHINE, Loads(groups, groups, zero, zero), rest_ms=10.0)
    assert cost.link_bytes[0] == cost.hot_bytes[0] == 120 * EXPERT_BYTES
    assert cost.busiest_bytes[0] >= cost.link_bytes[0] / NUM_RANKS
    assert cost.step_ms[0] == cost.expert_ms[0] + 10.0 > cost.link_ms[0] > 0
