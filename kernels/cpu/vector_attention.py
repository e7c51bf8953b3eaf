"""Paged attention in vectors: the same work in the same pieces as attention.py, for any element
type, where block sizes are multiples of 16 and head sizes of 32. Keys and values are widened to
float32 in registers.

A sub-block is 16 tokens of a block. Scores are products of a few rows by the tokens of two
sub-blocks, sums of values products of a few rows by the dimensions of a head (blocks.py). A row's
result is made by the same steps whatever other rows there are: sub-blocks begin at multiples of 16
tokens of the sequence, and what a row sees too much of has weight 0.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from .attention import FIELDS, fetch, pieces, softmax, sub_block, write
from .blocks import MOST_ROWS, multiply_elements
from .openmp import Kernel, thread_number
from .scalars import bytes_of, pointer

F32 = np.float32(0)
I32 = np.int32(0)


def _vector_attention(p, chunk, chunks):
    a = carray(p, 1)[0]
    size, heads, group, block_size = a.head_size, a.kv_heads, a.group, a.block_size
    element, cached = bytes_of(a.element), bytes_of(a.cached)
    head_bytes, row_bytes = size * block_size * cached, size * cached
    items = carray(pointer(a.items, a.items), (1,))[0]
    item_sequence = carray(pointer(a.item_sequence, I32), (items,))
    item_row = carray(pointer(a.item_row, I32), (items,))
    starts = carray(pointer(a.starts, I32), (a.sequences + 1,))
    contexts = carray(pointer(a.context, I32), (a.sequences,))
    rows = carray(pointer(a.rows, I32), (a.sequences,))
    scores_at = a.scratch + np.int64(thread_number()) * a.scratch_bytes
    weights_at = scores_at + 16 * a.width * 4
    sums_at = weights_at + 16 * a.width * 4
    scores = carray(pointer(scores_at, F32), (16, a.width))
    weights = carray(pointer(weights_at, F32), (16, a.width))
    sums = carray(pointer(sums_at, F32), (16, size))
    totals = np.empty(16, np.float32)
    head, item = chunk % heads, chunk // heads
    s = np.int64(item_sequence[item])
    start, length = np.int64(starts[s]), np.int64(starts[s + 1] - starts[s])
    table = carray(pointer(a.tables + np.int64(rows[s]) * a.table_width * 4, I32), (a.table_width,))
    first_row = np.int64(item_row[item])
    count = min(16, length * group - first_row)
    before = np.int64(contexts[s]) - length
    end = before + (first_row + count - 1) // group + 1
    begin = max(before + first_row // group - a.window + 1, 0) if a.window else 0
    first, last = begin // 16, (end - 1) // 16 + 1
    q = a.q + ((head * a.capacity + start) * group + first_row) * size * element
    for sub in range(first, last, 2):
        keys = sub_block(a.keys, table, sub * 16, head, heads, head_bytes, block_size, cached)
        ahead = np.int64(0)
        for other in range(sub + 1, min(sub + 4, last)):
            place = sub_block(
                a.keys, table, other * 16, head, heads, head_bytes, block_size, cached
            )
            if other == sub + 1:
                ahead = place - keys
            else:
                fetch(place, 16 * cached, size, block_size * cached)
        r = 0
        while r < count:
            here = min(count - r, MOST_ROWS)
            multiply_elements(
                here,
                q + r * size * element,
                size * element,
                a.element,
                keys,
                ahead,
                block_size * cached,
                a.cached,
                size,
                2,
                scores_at + (r * a.width + (sub - first) * 16) * 4,
                a.width * 4,
                False,
            )
            r += here
    for r in range(count):
        position = before + (first_row + r) // group
        low = max(position - a.window + 1, 0) - first * 16 if a.window else 0
        high = position + 1 - first * 16
        totals[r] = softmax(scores[r], weights[r], low, high, (last - first) * 16, a.scale)
        for d in range(size):
            sums[r, d] = np.float32(0)
    for sub in range(first, last):
        values = sub_block(
            a.values, table, sub * 16, head, heads, head_bytes, block_size, row_bytes
        )
        if sub + 2 < last:
            place = sub_block(
                a.values, table, (sub + 2) * 16, head, heads, head_bytes, block_size, row_bytes
            )
            fetch(place, row_bytes, 16, row_bytes)
        r = 0
        while r < count:
            here = min(count - r, MOST_ROWS)
            multiply_elements(
                here,
                weights_at + (r * a.width + (sub - first) * 16) * 4,
                a.width * 4,
                F32,
                values,
                16 * cached,
                row_bytes,
                a.cached,
                min(end - sub * 16, 16),
                size // 16,
                sums_at + r * size * 4,
                size * 4,
                True,
            )
            r += here
    for r in range(count):
        t, g = start + (first_row + r) // group, (first_row + r) % group
        place = a.out + t * a.out_bytes + (head * group + g) * size * element
        write(sums[r], np.float32(1) / totals[r], carray(pointer(place, a.element), (size,)))


vector_attention = Kernel(_vector_attention, FIELDS, "scale", pieces, has_cache=True)
