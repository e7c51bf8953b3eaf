"""Lists of any length, one for each row of the batch, kept so that many rows are read at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Places = NDArray[np.int64]


class RowLists:
    """Each row's list is a table: one array for each of `dtypes`, all of one length.

    `put` costs nothing where the list is and was empty; otherwise the next `gather` puts all rows'
    lists into flat arrays, so that one reads any number of rows without a loop.
    """

    def __init__(self, max_num_seqs: int, *dtypes: Any) -> None:
        self._dtypes = dtypes
        self._lists: dict[int, list[NDArray[Any]]] = {}
        self._flat: list[NDArray[Any]] | None = [np.empty(0, dtype) for dtype in dtypes]
        self._starts = np.zeros(max_num_seqs, np.int64)
        self._lengths = np.zeros(max_num_seqs, np.int64)

    def put(self, row: int, *columns: Any) -> None:
        """The list of `row` from now on."""
        pairs = zip(columns, self._dtypes, strict=True)
        arrays = [np.asarray(column, dtype) for column, dtype in pairs]
        had = self._lists.pop(row, None)
        if len(arrays[0]):
            self._lists[row] = arrays
        elif had is None:
            return
        self._lengths[row] = len(arrays[0])
        self._flat = None

    def gather(self, rows: Ints) -> tuple[Places, ...]:
        """The lists of `rows`, one after the other: of each element its place in `rows`, and its
        columns.
        """
        flat = self._flatten() if self._flat is None else self._flat
        if not self._lists:
            return (np.empty(0, np.int64), *flat)
        lengths = self._lengths[rows]
        place = np.repeat(np.arange(len(rows)), lengths)
        if not place.size:
            return (place, *[column[:0] for column in flat])
        before = np.cumsum(lengths) - lengths
        at = np.arange(len(place)) + (self._starts[rows] - before)[place]
        return (place, *[column[at] for column in flat])

    def _flatten(self) -> list[NDArray[Any]]:
        start = 0
        for row, (first, *_) in self._lists.items():
            self._starts[row] = start
            start += len(first)
        columns = zip(*self._lists.values(), strict=True)
        self._flat = [np.concatenate(parts) for parts in columns] or [
            np.empty(0, dtype) for dtype in self._dtypes
        ]
        return self._flat
