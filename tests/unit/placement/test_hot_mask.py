import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.constants import LAYER_RANK_BYTES, NUM_EXPERTS, NUM_LAYERS, RANK_EXPERT_BYTES
from placement.cost_model import page_bytes
from placement.hot_mask import BYTES_PER_GIB, hot_by_weight, num_hot_pages, whole_layers_cold
from placement.hot_set import hottest

EP_SIZES = st.sampled_from([1, 2, 4, 8])


@given(st.floats(0, 33), EP_SIZES)
def test_at_least_the_offloaded_bytes_go_and_at_most_a_page_more(offload_gib, ep_size):
    cold_bytes = RANK_EXPERT_BYTES - num_hot_pages(offload_gib, ep_size) * page_bytes(ep_size)
    assert 0 <= cold_bytes - offload_gib * BYTES_PER_GIB < page_bytes(ep_size) + 1e-3


@given(st.lists(st.integers(0, 5), min_size=48, max_size=48), st.integers(0, 6), EP_SIZES)
def test_every_group_of_ranks_keeps_its_heaviest_pages(values, num_hot, ep_size):
    weights = np.array(values).reshape(3, 16)
    mask = hot_by_weight(weights, num_hot, ep_size)
    for group in range(ep_size):
        experts = slice(group * 16 // ep_size, (group + 1) * 16 // ep_size)
        hot, cold = weights[:, experts][mask[:, experts]], weights[:, experts][~mask[:, experts]]
        assert len(hot) == min(num_hot, 48 // ep_size)
        assert not len(hot) or not len(cold) or hot.min() >= cold.max()


@given(st.lists(st.integers(0, 5), min_size=48, max_size=48), st.integers(0, 30), EP_SIZES)
def test_it_is_the_set_that_a_plan_would_choose(values, num_hot, ep_size):
    weights = np.array(values).reshape(3, 16)
    mask = hot_by_weight(weights, num_hot, ep_size)
    for group in range(ep_size):
        experts = slice(group * 16 // ep_size, (group + 1) * 16 // ep_size)
        planned = hottest(tuple(map(tuple, weights[:, experts].tolist())), num_hot)
        assert planned == tuple(tuple(row.nonzero()[0].tolist()) for row in mask[:, experts])


@given(st.floats(0, 33))
def test_the_baseline_moves_whole_layers(offload_gib):
    mask = whole_layers_cold(offload_gib)
    assert mask.shape == (NUM_LAYERS, NUM_EXPERTS)
    assert (mask.all(axis=1) | ~mask.any(axis=1)).all()
    cold_bytes = int((~mask.any(axis=1)).sum()) * LAYER_RANK_BYTES
    assert 0 <= cold_bytes - offload_gib * BYTES_PER_GIB <= LAYER_RANK_BYTES


def test_the_published_budget_takes_twelve_layers():
    assert (~whole_layers_cold(9.75).any(axis=1)).sum() == 12


@pytest.mark.parametrize("offload_gib", [-1, 34, float("nan")])
def test_more_than_there_is_cannot_go(offload_gib):
    with pytest.raises(ValueError, match="offload must be between 0 and 33.62 GiB"):
        num_hot_pages(offload_gib, 8)
