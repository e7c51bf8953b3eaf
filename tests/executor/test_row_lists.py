"""RowLists against a dict of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringcast.executor.row_lists import RowLists

NUM_ROWS = 5
ROW = st.integers(0, NUM_ROWS - 1)
PUT = st.tuples(ROW, st.lists(st.integers(0, 99), max_size=4))


@given(st.lists(st.tuples(PUT, st.lists(ROW, max_size=7)), max_size=12))
def test_gathers_what_was_put_last(steps: list[tuple[tuple[int, list[int]], list[int]]]) -> None:
    lists = RowLists(NUM_ROWS, np.int64, np.float32)
    plain: dict[int, list[int]] = {}
    for (row, values), rows in steps:
        lists.put(row, values, [value / 2 for value in values])
        plain[row] = values
        place, first, second = lists.gather(np.array(rows, np.int32))
        wanted = [(i, value) for i, row in enumerate(rows) for value in plain.get(row, [])]
        assert list(zip(place.tolist(), first.tolist(), strict=True)) == wanted
        assert second.tolist() == [value / 2 for _, value in wanted]
        assert (first.dtype, second.dtype) == (np.int64, np.float32)
