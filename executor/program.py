"""A forward pass as a list of operations, bound to their buffers once and run for any number of
rows.

Consecutive kernels become one tape, which is one call from Python. Where an operation is done by
one kernel for few rows and by torch for many (`ByRows`), there are two versions of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ..kernels.cpu.openmp import Launch, Tape

FEW_ROWS = 12  # up to here a row-by-row product beats torch's matrix product


class ByRows(NamedTuple):
    few: Launch | Callable[..., None]  # likewise, if it's no Launch
    many: Callable[[int], None]  # called with the number of rows


Operation = Launch | ByRows


class Program:
    """`rows` is the count that the operations' kernels read, int64 [1]; `run` sets it."""

    def __init__(self, rows: np.ndarray, operations: Iterable[Operation]) -> None:
        operations = list(operations)
        self._rows = rows
        self._few = _tapes([op.few if isinstance(op, ByRows) else op for op in operations])
        self._many = _tapes([op.many if isinstance(op, ByRows) else op for op in operations])

    def run(self, rows: int) -> None:
        self._rows[0] = rows
        for call in self._few if rows <= FEW_ROWS else self._many:
            call(rows)


def _tapes(operations: list[Launch | Callable[[int], None]]) -> list[Callable[[int], None]]:
    calls: list[Callable[[int], None]] = []
    launches: list[Launch] = []
    for operation in [*operations, None]:
        if isinstance(operation, Launch):
            launches.append(operation)
            continue
        if launches:
            calls.append(Tape(launches))
            launches = []
        if operation is not None:
            calls.append(operation)
    return calls
