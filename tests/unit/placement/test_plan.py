from hypothesis import given, settings
from hypothesis import strategies as st

from placement.plan import spread_evenly

LAYERS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(deadline=None)
@given(LAYERS, st.integers(0, 150))
def test_the_bound_is_used_whole_and_never_exceeded(experts_per_layer, max_resident_pages):
    plan = spread_evenly(experts_per_layer, max_resident_pages)
    assert plan.num_hot == min(max_resident_pages, sum(experts_per_layer))
    for hot, num_experts in zip(plan.hot_experts, experts_per_layer, strict=True):
        assert list(hot) == sorted(set(hot))
        assert set(hot) <= set(range(num_experts))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 150))
def test_equal_layers_differ_by_one_page_at_most(num_experts, num_layers, max_resident_pages):
    counts = [len(hot) for hot in spread_evenly([num_experts] * num_layers, max_resident_pages).hot_experts]
    assert max(counts) - min(counts) <= 1


@settings(deadline=None)
@given(LAYERS)
def test_without_a_bound_every_page_is_hot(experts_per_layer):
    plan = spread_evenly(experts_per_layer, None)
    assert plan.hot_experts == tuple(tuple(range(count)) for count in experts_per_layer)
