"""The limit is where staging begins to win."""

import pytest

from actors.rows_in_place import largest_in_place


@pytest.mark.parametrize(
    ("in_place", "limit"),
    [([1, 2, 3, 4], 64), ([3, 2, 3, 4], 0), ([1, 2, 9, 4], 16), ([1, 2, 3, 9], 32), ([2, 2, 5, 5], 16)],
)
def test_it_is_the_last_number_of_rows_before_staging_is_faster(in_place, limit):
    rows = (8, 16, 32, 64)
    times = dict(zip(rows, in_place, strict=True))
    assert largest_in_place(rows, lambda n: times[n], lambda n: {8: 2, 16: 3, 32: 4, 64: 5}[n]) == limit
