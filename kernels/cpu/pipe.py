"""What a stage of a pipeline hands to those after it, through memory that processes share: rows of
numbers, an item at a time, in their order. Stages on several hosts share it, too: each host has a
copy (executor/mirror.py).

A pipe has one writer and some readers, each of which takes every item. Items go into slots in turn.
Neither launch here waits: whoever launches has seen in the counts that there is an item, or room
for one (executor/pipeline.py). The counts are read here once more, with the order that the data
needs.

    memory   a line: items sent              raised by the writer after its last write (release),
                                             read by every reader before it reads (acquire)
             a line per reader: items taken  raised by the reader after its last read (release),
                                             read by the writer before it overwrites (acquire)
             the slots (memory.py)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from .exchange import copy
from .memory import LINE
from .memory import pipe_bytes as pipe_bytes
from .memory import slot_bytes as slot_bytes
from .openmp import Chunks, Kernel
from .scalars import pointer, read, take

_I64 = np.int64(0)


def _send(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, _I64), (1,))[0]
    for reader in range(a.readers):
        read(a.pipe + LINE * (1 + reader))
    item = read(a.pipe)
    slot = a.pipe + LINE * (1 + a.readers) + item % a.slots * a.slot_bytes
    carray(pointer(slot, _I64), (1,))[0] = 4 * rows * a.width
    for row in range(rows):
        copy(a.x + 4 * row * a.width, slot + LINE + 4 * row * a.width, a.width)
    take(a.pipe)


def _receive(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, _I64), (1,))[0]
    read(a.pipe)
    item = read(a.pipe + LINE * (1 + a.reader))
    slot = a.pipe + LINE * (1 + a.readers) + item % a.slots * a.slot_bytes
    for row in range(rows):
        copy(slot + LINE + 4 * row * a.width, a.x + 4 * row * a.width, a.width)
    take(a.pipe + LINE * (1 + a.reader))


def _one(arguments: dict[str, Any]) -> Chunks:
    return Chunks(1)


# x [rows, width], of four bytes each; both sides have the same rows and width. pipe: its memory.
_FIELDS = "rows pipe readers slots slot_bytes width x"
send_kernel = Kernel(_send, _FIELDS, chunks=_one)
receive_kernel = Kernel(_receive, _FIELDS + " reader", chunks=_one)
