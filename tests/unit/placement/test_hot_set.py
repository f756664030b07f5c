from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.hot_set import HotSet, Rates, choice_rates, expected_cold_pages, hottest, offload_layers

RATES = st.lists(
    st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 1.0]), min_size=1, max_size=4).map(tuple),
    min_size=1,
    max_size=3,
).map(tuple)


def all_sets(rates: Rates, num_hot: int) -> list[HotSet]:
    pages = [(layer, expert) for layer, row in enumerate(rates) for expert in range(len(row))]
    return [
        tuple(tuple(e for at, e in chosen if at == layer) for layer in range(len(rates)))
        for chosen in combinations(pages, min(num_hot, len(pages)))
    ]


@settings(deadline=None)
@given(RATES, st.integers(0, 12), st.integers(1, 200))
def test_no_set_of_as_many_pages_leaves_fewer_cold_ones_to_read(rates, num_hot, num_rows):
    def cost(hot: HotSet) -> float:
        return sum(expected_cold_pages(rates, hot, num_rows))

    hot = hottest(rates, num_hot)
    assert hot in all_sets(rates, num_hot)
    assert cost(hot) <= min(map(cost, all_sets(rates, num_hot))) + 1e-12


def test_ties_go_to_the_lower_layer_and_expert():
    assert hottest(((0.5, 0.5, 0.5), (0.5, 0.9)), 3) == ((0, 1), (1,))


def test_a_layer_that_saw_fewer_rows_is_not_colder_for_it():
    rates = choice_rates(((30, 10), (3, 1), (0, 0)), (1, 2, 1))
    assert rates == ((0.75, 0.25), (1.5, 0.5), (0.0, 0.0))
    assert hottest(rates, 3) == ((0,), (0, 1), ())


@pytest.mark.parametrize(
    ("max_hot", "hot_layers"),
    [(0, []), (1, []), (2, [3]), (5, [3]), (6, [2, 3]), (9, [2, 3]), (14, [0, 1, 2, 3]), (99, [0, 1, 2, 3])],
)
def test_an_offload_moves_whole_layers_from_the_first_on(max_hot: int, hot_layers: list[int]) -> None:
    experts_per_layer = (4, 4, 4, 2)
    hot = offload_layers(experts_per_layer, max_hot)
    assert hot == tuple(tuple(range(n)) if at in hot_layers else () for at, n in enumerate(experts_per_layer))


def test_a_page_that_several_rows_choose_is_read_once():
    (cold,) = expected_cold_pages(((0.5, 0.25, 1.0),), ((2,),), num_rows=2)
    assert cold == 0.75 + (1 - 0.75**2)
    assert expected_cold_pages(((2.0,),), ((),), num_rows=3) == (1.0,)  # counts that no router gives
