"""What processes tell each other within a step, through memory that they share: sums of their rows,
their rows side by side, one rank's rows. Processes of several hosts share it, too: each host has a
copy of all of it (executor/mirror.py).

A launch does the same on every rank: it writes the rank's rows into a slot, a piece at a time,
raises the rank's count, waits until the counts of all have come as far, and reads the slots. All
ranks must launch the same, in the same order, with as many rows. Sums are made in the order of
ranks: the same bits on every rank, whatever the number of rows.

Pieces alternate between two slots. Who writes piece n + 2 has seen all counts reach n + 1, and a
rank raises its count to n + 1 only after it has read piece n: nothing is overwritten unread.

Large launches are cut into lanes, each with slots and counts of its own, so that several threads
can have one each. Threads take lanes in their order, so of the lanes that are not done the first
one has a thread on every rank, and the ranks always come together.

    memory   a line: 1 once a rank has left (set in executor/parallel.py; read here while waiting)
             a line per rank, for executor/parallel.py
             per lane a line per rank: its count     raised after writing a piece (release), read
                                                     by all before they read it (acquire)
             per lane, of either parity, per rank: a slot (memory.py)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit, types

from .memory import EXCHANGE_SLOT_BYTES as _SLOT_BYTES
from .memory import LANES, LINE, SLOT_WORDS
from .memory import memory_bytes as memory_bytes
from .openmp import Chunks, Kernel, offer_core, pause
from .scalars import pointer, read, take

SUM, SIDE_BY_SIDE, FROM_ONE = 0, 1, 2
LEFT, TOO_LATE = 1, 2  # what `status` becomes

NAP_MICROSECONDS = 50
_SPINS, _OFFERS = 400, 2000  # then it naps
_LEAST_WORDS = 4096  # of a lane
_F32, _I64 = np.float32(0), np.int64(0)

_nap = types.ExternalFunction("usleep", types.int32(types.uint32))


def exchange(parts: list[torch.Tensor], mode: int, root: int = 0) -> torch.Tensor:
    """Reference: what every rank has afterwards, of all ranks' rows."""
    if mode == SUM:
        return torch.stack(parts).sum(0)
    return torch.cat(parts, 1) if mode == SIDE_BY_SIDE else parts[root]


@njit(error_model="numpy")
def _wait(count: Any, wanted: Any, left: Any, naps: Any) -> Any:
    """Until the count is there: 0, or else what the status becomes."""
    tries = 0
    while read(count) < wanted:
        tries += 1
        if tries < _SPINS:
            pause()
        elif tries < _SPINS + _OFFERS:
            offer_core()
        else:
            if read(left) != 0:
                # It may have come this far just now, and left behind it.
                return LEFT if read(count) < wanted else 0
            if tries > _SPINS + _OFFERS + naps:
                return TOO_LATE
            _nap(np.uint32(NAP_MICROSECONDS))
    return 0


@njit(error_model="numpy")
def copy(source: Any, target: Any, words: Any) -> None:
    x = carray(pointer(source, _F32), (words,))
    y = carray(pointer(target, _F32), (words,))
    for i in range(words):
        y[i] = x[i]


@njit(error_model="numpy")
def _add(source: Any, target: Any, words: Any) -> None:
    x = carray(pointer(source, _F32), (words,))
    y = carray(pointer(target, _F32), (words,))
    for i in range(words):
        y[i] += x[i]


def _exchange(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, _I64), (1,))[0]
    status = carray(pointer(a.status, _I64), (1,))
    lanes = min(min(chunks, a.lanes), 1 + rows * a.width // _LEAST_WORDS)
    if chunk >= lanes or status[0] != 0:
        return
    counts = a.memory + LINE * (1 + a.ranks + chunk * a.ranks)
    slots = a.memory + LINE * (1 + a.ranks + LANES * a.ranks) + chunk * 2 * a.ranks * _SLOT_BYTES
    end = rows * (chunk + 1) // lanes
    most_columns = min(a.width, SLOT_WORDS)
    most_rows = SLOT_WORDS // most_columns
    for column in range(0, a.width, most_columns):
        columns = min(most_columns, a.width - column)
        for row in range(rows * chunk // lanes, end, most_rows):
            height = min(most_rows, end - row)
            piece = read(counts + a.rank * LINE) + 1
            slot = slots + piece % 2 * a.ranks * _SLOT_BYTES
            x = a.x + 4 * (row * a.x_stride + column)
            own = slot + a.rank * _SLOT_BYTES
            used = carray(pointer(own, _I64), (1,))
            used[0] = 0
            if a.mode != FROM_ONE or a.rank == a.root:
                used[0] = 4 * height * columns
                for i in range(height):
                    copy(x + 4 * i * a.x_stride, own + LINE + 4 * i * columns, columns)
            take(counts + a.rank * LINE)
            for other in range(a.ranks):
                failed = _wait(counts + other * LINE, piece, a.memory, a.naps)
                if failed != 0:
                    status[0] = failed
                    return
            out = a.out + 4 * (row * a.out_stride + column)
            for i in range(height):
                part = slot + LINE + 4 * i * columns
                target = out + 4 * i * a.out_stride
                if a.mode == SIDE_BY_SIDE:
                    if a.out != 0:
                        for other in range(a.ranks):
                            there = target + 4 * other * a.width
                            copy(part + other * _SLOT_BYTES, there, columns)
                elif a.mode == FROM_ONE:
                    if a.out != 0 and a.rank != a.root:
                        copy(part + a.root * _SLOT_BYTES, target, columns)
                else:
                    copy(part, target, columns)
                    for other in range(1, a.ranks):
                        _add(part + other * _SLOT_BYTES, target, columns)


def _chunks(arguments: dict[str, Any]) -> Chunks:
    return Chunks(arguments["rows"], 1, LANES)


# x [rows, x_stride] and out [rows, out_stride], of four bytes each; out may be x, and but for SUM
# nothing. root: whose rows FROM_ONE takes; the others' x isn't read. status int64 [1]: what went
# wrong, after which no launch does anything. naps: how often to wait for NAP_MICROSECONDS, before
# it's too late.
exchange_kernel = Kernel(
    _exchange,
    "rows memory ranks rank root lanes mode width x x_stride out out_stride status naps",
    chunks=_chunks,
)
