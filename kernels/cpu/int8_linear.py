"""y = x W' + b with x as two bytes and W as one (quantize.py), for any number of rows: on matrix
tiles, in vectors, or by plain arithmetic, as the processor can.

A row of x is two rows of bytes, high and low, which the products don't tell apart. Their sums are
whole numbers and exact, so all three give the same result bit for bit, for every number of rows and
whatever the other rows are. Each reads the weights once from memory.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from . import blocks, tiles, vectors
from .openmp import Chunks, Kernel, thread_number
from .quantize import LOW, OFFSET
from .scalars import pointer

F32 = np.float32(0)
I32 = np.int32(0)

STRIP = 32  # outputs that are computed together
SOME_ROWS = 16  # of x, in two times as many rows of bytes, that tiles compute together
VECTOR_ROWS = blocks.MOST_BYTE_ROWS // 2  # likewise vectors
CACHED_BYTES = 512 << 10  # of weights that stay in a second-level cache while all rows pass by
SCRATCH_BYTES = SOME_ROWS * 2 * STRIP * 4  # for each thread


def int8_linear(
    q_T2K: torch.Tensor,
    row_scales_T: torch.Tensor,
    u_NK: torch.Tensor,
    scales_N: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference. float32 [T, N] from int8 rows and unsigned bytes of weights, bit for bit."""
    high_TN, low_TN = (q_T2K.long() @ (u_NK.long() - OFFSET).T).float().unbind(1)
    y_TN = (high_TN + low_TN * LOW) * row_scales_T[:, None] * scales_N
    return y_TN if bias_N is None else y_TN + bias_N


@njit(error_model="numpy")
def _scratch(a):
    return a.scratch + np.int64(thread_number()) * SCRATCH_BYTES


@njit(error_model="numpy")
def _total(results, sum_of_bytes):
    """Sums of products with the weights' offset taken off."""
    zero = vectors.spread(sum_of_bytes * np.int32(OFFSET))
    return vectors.to_real(vectors.subtract(vectors.load(results), zero))


@njit(error_model="numpy")
def _finish(a, first, rows, strip, results):
    """y [first : first + rows, 32 outputs] from the sums of their bytes, int32 [2 * rows, 32]."""
    row_scales = carray(pointer(a.row_scales + first * 4, F32), (rows,))
    sums = carray(pointer(a.sums + first * 8, I32), (rows, 2))
    for half in range(2):
        n = strip * STRIP + half * 16
        scales = vectors.load_real(a.scales + n * 4)
        for t in range(rows):
            own = results + (4 * t + half) * 64
            high, low = _total(own, sums[t, 0]), _total(own + 128, sums[t, 1])
            total = vectors.add(high, vectors.multiply(low, vectors.spread(LOW)))
            y = vectors.multiply(vectors.multiply(total, vectors.spread(row_scales[t])), scales)
            if a.bias:
                y = vectors.add(y, vectors.load_real(a.bias + n * 4))
            vectors.store(a.y + ((first + t) * a.outer + n) * 4, y)


@njit(error_model="numpy")
def _tile_32(x, w, results, depth):
    """17 to 32 rows of bytes: tiles 0 to 3 accumulate, 4 and 5 hold x, 6 and 7 weights."""
    stride = depth * 64
    tiles.zero(0)
    tiles.zero(1)
    tiles.zero(2)
    tiles.zero(3)
    for k in range(depth):
        tiles.load(6, w + k * 1024, 64)
        tiles.load(7, w + (depth + k) * 1024, 64)
        tiles.load(4, x + k * 64, stride)
        tiles.load(5, x + 16 * stride + k * 64, stride)
        tiles.multiply_bytes(0, 4, 6)
        tiles.multiply_bytes(1, 4, 7)
        tiles.multiply_bytes(2, 5, 6)
        tiles.multiply_bytes(3, 5, 7)
    tiles.store(0, results, 128)
    tiles.store(1, results + 64, 128)
    tiles.store(2, results + 16 * 128, 128)
    tiles.store(3, results + 16 * 128 + 64, 128)


@njit(error_model="numpy")
def _tile_16(x, w, results, depth):
    """1 to 16 rows of bytes."""
    stride = depth * 64
    tiles.zero(0)
    tiles.zero(1)
    for k in range(depth):
        tiles.load(6, w + k * 1024, 64)
        tiles.load(7, w + (depth + k) * 1024, 64)
        tiles.load(4, x + k * 64, stride)
        tiles.multiply_bytes(0, 4, 6)
        tiles.multiply_bytes(1, 4, 7)
    tiles.store(0, results, 128)
    tiles.store(1, results + 64, 128)


def _int8_tile_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    strips, some = a.outer // STRIP, max(1, CACHED_BYTES // (a.inner * STRIP))
    first, last = strips * chunk // chunks, strips * (chunk + 1) // chunks
    depth = a.inner // 64
    results = _scratch(a)
    while first < last:
        end = min(first + some, last)
        t = 0
        while t < rows:
            here = min(rows - t, SOME_ROWS)
            tiles.configure(a.configurations + (2 * here - 1) * 64)
            x = a.x + t * 2 * a.inner
            for strip in range(first, end):
                w = a.weight + strip * a.inner * STRIP
                if here > 8:
                    _tile_32(x, w, results, depth)
                else:
                    _tile_16(x, w, results, depth)
                _finish(a, t, here, strip, results)
            t += SOME_ROWS
        first = end
    tiles.release()


def _int8_vector_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    strips, some = a.outer // STRIP, max(1, CACHED_BYTES // (a.inner * STRIP))
    first, last = strips * chunk // chunks, strips * (chunk + 1) // chunks
    results = _scratch(a)
    while first < last:
        end = min(first + some, last)
        t, left = 0, -(-rows // VECTOR_ROWS)
        while left:
            here = -(-(rows - t) // left)
            for strip in range(first, end):
                x, w = a.x + t * 2 * a.inner, a.weight + strip * a.inner * STRIP
                stride = a.inner
                blocks.multiply_bytes(2 * here, x, stride, w, stride * 16, stride // 4, results)
                _finish(a, t, here, strip, results)
            t += here
            left -= 1
        first = end


@njit(error_model="numpy")
def _plain(x, w, results, inner):
    """One row of bytes, 16 outputs."""
    total = vectors.zeros()
    for k in range(0, inner, 4):
        weights, four = vectors.load(w + k * 16), vectors.broadcast(x + k)
        total = vectors.add_products(total, weights, four)
    vectors.store(results, total)


def _int8_plain_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    strips = a.outer // STRIP
    first, last = strips * chunk // chunks, strips * (chunk + 1) // chunks
    results = _scratch(a)
    for strip in range(first, last):
        w = a.weight + strip * a.inner * STRIP
        for t in range(rows):
            for part in range(2):
                x = a.x + (2 * t + part) * a.inner
                _plain(x, w, results + part * 128, a.inner)
                _plain(x, w + a.inner * 16, results + part * 128 + 64, a.inner)
            _finish(a, t, 1, strip, results)


def _chunks(arguments: dict[str, object]) -> Chunks:
    return Chunks(arguments["outer"] // STRIP)


# x int8 [rows, 2, inner], row_scales float32 [rows] and sums int32 [rows, 2] (split_rows_kernel);
# weight and scales float32 [outer] (quantize); bias float32 [outer] or 0; y float32 [rows, outer].
# inner and outer are multiples of 64. scratch: SCRATCH_BYTES for each thread. configurations: tiles
# alone need them.
_ARGUMENTS = "rows x row_scales sums weight scales bias y inner outer scratch configurations"
int8_tile_linear = Kernel(_int8_tile_linear, _ARGUMENTS, chunks=_chunks)
int8_vector_linear = Kernel(_int8_vector_linear, _ARGUMENTS, chunks=_chunks)
int8_plain_linear = Kernel(_int8_plain_linear, _ARGUMENTS, chunks=_chunks)
