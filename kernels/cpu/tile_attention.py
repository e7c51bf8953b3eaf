"""Paged attention on matrix tiles: the same work in the same pieces as attention.py, for bfloat16.

A piece has at most 16 rows, as a tile has. A sub-block is 16 tokens of a block. The key cache holds
pairs of head dimensions, and the value cache pairs of tokens, side by side, so that both are loaded
as right-hand tiles as they lie. Tiles 0 to 3 accumulate, 4 holds queries, 5 keys, 6 weights, 7
values.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from . import tiles
from .attention import FIELDS, fetch, pieces, softmax, sub_block, write
from .openmp import Kernel, thread_number
from .scalars import pointer

F32 = np.float32(0)
I32 = np.int32(0)

# By number of rows, from 1.
CONFIGURATIONS = tiles.configurations(
    [[(rows, 64)] * 5 + [(16, 64), (rows, 32), (8, 64)] for rows in range(1, 17)]
)


@njit(error_model="numpy")
def _score(q, keys, scores, depth, size, block_size):
    tiles.zero(0)
    for k in range(depth):
        tiles.load(4, q + k * 64, size * 2)
        tiles.load(5, keys + k * 64 * block_size, block_size * 4)
        tiles.multiply(0, 4, 5)
    tiles.store(0, scores[0], scores[1])


@njit(error_model="numpy")
def _copy_valid(source, target, count, size):
    """A sub-block of values with zeros beyond `count` tokens (0 times whatever is there could be
    NaN).
    """
    for t in range(16):
        for d in range(size):
            place = (t // 2) * size * 2 + d * 2 + t % 2
            target[place] = source[place] if t < count else np.uint16(0)


@njit(error_model="numpy")
def _sum(first, last, weights, width, a, table, head, head_bytes, partial, context, out, d):
    """Columns d .. d + 64 (or + 32, at the end) of weights x values, sub-blocks first .. last."""
    wide = d + 64 <= a.head_size
    tiles.zero(0)
    tiles.zero(1)
    tiles.zero(2)
    tiles.zero(3)
    for sub in range(first, last):
        if (sub + 1) * 16 > context:
            v = partial
        else:
            v = sub_block(
                a.values,
                table,
                sub * 16,
                head,
                a.kv_heads,
                head_bytes,
                a.block_size,
                a.head_size * 2,
            )
        v += d * 4
        tiles.load(6, weights + (sub - first) * 32, width * 2)
        tiles.load(7, v, a.head_size * 4)
        tiles.multiply(0, 6, 7)
        tiles.load(7, v + 64, a.head_size * 4)
        tiles.multiply(1, 6, 7)
        if wide:
            tiles.load(7, v + 128, a.head_size * 4)
            tiles.multiply(2, 6, 7)
            tiles.load(7, v + 192, a.head_size * 4)
            tiles.multiply(3, 6, 7)
    tiles.store(0, out + d * 4, a.head_size * 4)
    tiles.store(1, out + d * 4 + 64, a.head_size * 4)
    if wide:
        tiles.store(2, out + d * 4 + 128, a.head_size * 4)
        tiles.store(3, out + d * 4 + 192, a.head_size * 4)


def _tile_attention(p, chunk, chunks):
    a = carray(p, 1)[0]
    size, heads, group = a.head_size, a.kv_heads, a.group
    head_bytes = size * a.block_size * 2
    items = carray(pointer(a.items, a.items), (1,))[0]
    item_sequence = carray(pointer(a.item_sequence, I32), (items,))
    item_row = carray(pointer(a.item_row, I32), (items,))
    starts = carray(pointer(a.starts, I32), (a.sequences + 1,))
    contexts = carray(pointer(a.context, I32), (a.sequences,))
    rows = carray(pointer(a.rows, I32), (a.sequences,))
    scores_at = a.scratch + np.int64(thread_number()) * a.scratch_bytes
    weights_at = scores_at + 16 * a.width * 4
    sums_at = weights_at + 16 * a.width * 4
    partial_at = sums_at + 16 * size * 4
    scores = carray(pointer(scores_at, F32), (16, a.width))
    weights = carray(pointer(weights_at, a.element), (16, a.width))
    sums = carray(pointer(sums_at, F32), (16, size))
    totals = np.empty(16, np.float32)
    head, item = chunk % heads, chunk // heads
    s = np.int64(item_sequence[item])
    start, length, context = (
        np.int64(starts[s]),
        np.int64(starts[s + 1] - starts[s]),
        np.int64(contexts[s]),
    )
    table = carray(pointer(a.tables + np.int64(rows[s]) * a.table_width * 4, I32), (a.table_width,))
    first_row = np.int64(item_row[item])
    count = min(16, length * group - first_row)
    before = context - length
    end = before + (first_row + count - 1) // group + 1
    begin = max(before + first_row // group - a.window + 1, 0) if a.window else 0
    first, last = begin // 16, (end - 1) // 16 + 1
    tiles.configure(a.configurations + (count - 1) * 64)
    q = a.q + ((head * a.capacity + start) * group + first_row) * size * 2
    for sub in range(first, last):
        k = sub_block(a.keys, table, sub * 16, head, heads, head_bytes, a.block_size, 4)
        v = sub_block(a.values, table, sub * 16, head, heads, head_bytes, a.block_size, size * 2)
        fetch(v, size * 4, 8, size * 4)
        if sub + 1 < last:
            ahead = sub_block(
                a.keys, table, (sub + 1) * 16, head, heads, head_bytes, a.block_size, 4
            )
            fetch(ahead, 64, size // 2, a.block_size * 4)
        _score(q, k, (scores_at + (sub - first) * 64, a.width * 4), size // 32, size, a.block_size)
    for r in range(count):
        position = before + (first_row + r) // group
        low = max(position - a.window + 1, 0) - first * 16 if a.window else 0
        high = position + 1 - first * 16
        totals[r] = softmax(scores[r], weights[r], low, high, (last - first) * 16, a.scale)
    if last * 16 > context:
        v = sub_block(
            a.values, table, (last - 1) * 16, head, heads, head_bytes, a.block_size, size * 2
        )
        _copy_valid(
            carray(pointer(v, a.element), (16 * size,)),
            carray(pointer(partial_at, a.element), (16 * size,)),
            context - (last - 1) * 16,
            size,
        )
    for d in range(0, size, 64):
        _sum(
            first,
            last,
            weights_at,
            a.width,
            a,
            table,
            head,
            head_bytes,
            partial_at,
            context,
            sums_at,
            d,
        )
    for r in range(count):
        t, g = start + (first_row + r) // group, (first_row + r) % group
        place = a.out + t * a.out_bytes + (head * group + g) * size * 2
        write(sums[r], np.float32(1) / totals[r], carray(pointer(place, a.element), (size,)))
    tiles.release()


# Head sizes are multiples of 32, block sizes of 16.
tile_attention = Kernel(
    _tile_attention, FIELDS + " configurations", "scale", pieces, has_cache=True
)
