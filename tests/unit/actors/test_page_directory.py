from hypothesis import given, settings
from hypothesis import strategies as st

from actors.page_directory import PageDirectory


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_pages_are_dense_in_layer_order_and_index_and_locate_are_inverses(experts_per_layer):
    directory = PageDirectory(experts_per_layer)
    pairs = [(layer, expert) for layer, count in enumerate(experts_per_layer) for expert in range(count)]
    assert [directory.index(layer, expert) for layer, expert in pairs] == list(range(directory.num_pages))
    assert [directory.locate(page) for page in range(directory.num_pages)] == pairs
