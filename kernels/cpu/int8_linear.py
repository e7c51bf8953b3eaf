"""y = x W' + b with x and W as bytes (quantize.py), for any number of rows: on matrix tiles, in
vectors, or by plain arithmetic, as the processor can.

All three sum whole numbers exactly, so they give the same result bit for bit, for every number of
rows and whatever the other rows are. Each reads the weights once from memory.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from . import tiles, vectors
from .openmp import Chunks, Kernel
from .quantize import OFFSET
from .scalars import pointer

F32 = np.float32(0)
I32 = np.int32(0)

STRIP = 32  # outputs that are computed together
CACHED_BYTES = 512 << 10  # of weights that stay in a second-level cache while all rows pass by


def int8_linear(
    q_TK: torch.Tensor,
    row_scales_T: torch.Tensor,
    u_NK: torch.Tensor,
    scales_N: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference. float32 [T, N] from int8 rows and unsigned bytes of weights, bit for bit."""
    sums_TN = (q_TK.long() @ (u_NK.long() - OFFSET).T).float()
    y_TN = sums_TN * row_scales_T[:, None] * scales_N
    return y_TN if bias_N is None else y_TN + bias_N


@njit(error_model="numpy")
def _finish_16(a, first, rows, n):
    """Sums, as the bits of y [first : first + rows, n : n + 16], become results."""
    scales = vectors.load_real(a.scales + n * 4)
    row_scales = carray(pointer(a.row_scales + first * 4, F32), (rows,))
    sums = carray(pointer(a.sums + first * 4, I32), (rows,))
    for t in range(rows):
        place = a.y + ((first + t) * a.outer + n) * 4
        zero = vectors.spread(sums[t] * np.int32(OFFSET))
        total = vectors.to_real(vectors.subtract(vectors.load(place), zero))
        y = vectors.multiply(vectors.multiply(total, vectors.spread(row_scales[t])), scales)
        if a.bias:
            y = vectors.add(y, vectors.load_real(a.bias + n * 4))
        vectors.store(place, y)


@njit(error_model="numpy")
def _finish_strip(a, first, rows, n):
    _finish_16(a, first, rows, n)
    _finish_16(a, first, rows, n + 16)


@njit(error_model="numpy")
def _tile_32(x, w, y, depth, y_stride):
    """17 to 32 rows: tiles 0 to 3 accumulate, 4 and 5 hold x, 6 and 7 weights."""
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
    tiles.store(0, y, y_stride)
    tiles.store(1, y + 64, y_stride)
    tiles.store(2, y + 16 * y_stride, y_stride)
    tiles.store(3, y + 16 * y_stride + 64, y_stride)


@njit(error_model="numpy")
def _tile_16(x, w, y, depth, y_stride):
    """1 to 16 rows."""
    stride = depth * 64
    tiles.zero(0)
    tiles.zero(1)
    for k in range(depth):
        tiles.load(6, w + k * 1024, 64)
        tiles.load(7, w + (depth + k) * 1024, 64)
        tiles.load(4, x + k * 64, stride)
        tiles.multiply_bytes(0, 4, 6)
        tiles.multiply_bytes(1, 4, 7)
    tiles.store(0, y, y_stride)
    tiles.store(1, y + 64, y_stride)


def _int8_tile_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    strips, some = a.outer // STRIP, max(1, CACHED_BYTES // (a.inner * STRIP))
    first, last = strips * chunk // chunks, strips * (chunk + 1) // chunks
    depth, y_stride = a.inner // 64, a.outer * 4
    while first < last:
        end = min(first + some, last)
        t = 0
        while t < rows:
            here = min(rows - t, 32)
            tiles.configure(a.configurations + (here - 1) * 64)
            x, y = a.x + t * a.inner, a.y + t * y_stride
            for strip in range(first, end):
                w, place = a.weight + strip * a.inner * STRIP, y + strip * STRIP * 4
                if here > 16:
                    _tile_32(x, w, place, depth, y_stride)
                else:
                    _tile_16(x, w, place, depth, y_stride)
                _finish_strip(a, t, here, strip * STRIP)
            t += 32
        first = end
    tiles.release()


@njit(error_model="numpy")
def _vectors_4(x, w, y, inner, y_stride):
    """Four rows: eight vectors accumulate. w: two blocks of 16 outputs, one after the other."""
    a0, a1, b0, b1 = vectors.zeros(), vectors.zeros(), vectors.zeros(), vectors.zeros()
    c0, c1, d0, d1 = vectors.zeros(), vectors.zeros(), vectors.zeros(), vectors.zeros()
    for k in range(0, inner, 4):
        w0 = vectors.load(w + k * 16)
        w1 = vectors.load(w + (inner + k) * 16)
        a = vectors.broadcast(x + k)
        b = vectors.broadcast(x + inner + k)
        c = vectors.broadcast(x + 2 * inner + k)
        d = vectors.broadcast(x + 3 * inner + k)
        a0, a1 = vectors.add_products(a0, w0, a), vectors.add_products(a1, w1, a)
        b0, b1 = vectors.add_products(b0, w0, b), vectors.add_products(b1, w1, b)
        c0, c1 = vectors.add_products(c0, w0, c), vectors.add_products(c1, w1, c)
        d0, d1 = vectors.add_products(d0, w0, d), vectors.add_products(d1, w1, d)
    vectors.store(y, a0)
    vectors.store(y + 64, a1)
    vectors.store(y + y_stride, b0)
    vectors.store(y + y_stride + 64, b1)
    vectors.store(y + 2 * y_stride, c0)
    vectors.store(y + 2 * y_stride + 64, c1)
    vectors.store(y + 3 * y_stride, d0)
    vectors.store(y + 3 * y_stride + 64, d1)


@njit(error_model="numpy")
def _vectors_1(x, w, y, inner):
    """One row; four vectors accumulate, so that no product waits for the one before."""
    a0, a1, b0, b1 = vectors.zeros(), vectors.zeros(), vectors.zeros(), vectors.zeros()
    for k in range(0, inner, 8):
        a, b = vectors.broadcast(x + k), vectors.broadcast(x + k + 4)
        a0 = vectors.add_products(a0, vectors.load(w + k * 16), a)
        a1 = vectors.add_products(a1, vectors.load(w + (inner + k) * 16), a)
        b0 = vectors.add_products(b0, vectors.load(w + (k + 4) * 16), b)
        b1 = vectors.add_products(b1, vectors.load(w + (inner + k + 4) * 16), b)
    vectors.store(y, vectors.add(a0, b0))
    vectors.store(y + 64, vectors.add(a1, b1))


def _int8_vector_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    strips, some = a.outer // STRIP, max(1, CACHED_BYTES // (a.inner * STRIP))
    first, last = strips * chunk // chunks, strips * (chunk + 1) // chunks
    while first < last:
        end = min(first + some, last)
        t = 0
        while t < rows:
            here = 4 if rows - t >= 4 else 1
            x, y = a.x + t * a.inner, a.y + t * a.outer * 4
            for strip in range(first, end):
                w, place = a.weight + strip * a.inner * STRIP, y + strip * STRIP * 4
                if here == 4:
                    _vectors_4(x, w, place, a.inner, a.outer * 4)
                else:
                    _vectors_1(x, w, place, a.inner)
                _finish_strip(a, t, here, strip * STRIP)
            t += here
        first = end


@njit(error_model="numpy")
def _plain(x, w, y, inner):
    """One row, 16 outputs."""
    total = vectors.zeros()
    for k in range(0, inner, 4):
        weights, four = vectors.load(w + k * 16), vectors.broadcast(x + k)
        total = vectors.add_products_anywhere(total, weights, four)
    vectors.store(y, total)


def _int8_plain_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    blocks = a.outer // 16
    first, last = blocks * chunk // chunks, blocks * (chunk + 1) // chunks
    for block in range(first, last):
        for t in range(rows):
            place = a.y + (t * a.outer + block * 16) * 4
            _plain(a.x + t * a.inner, a.weight + block * a.inner * 16, place, a.inner)
        _finish_16(a, 0, rows, block * 16)


def _chunks(arguments: dict[str, object]) -> Chunks:
    return Chunks(arguments["outer"] // STRIP)


# x int8 [rows, inner], row_scales float32 and sums int32 [rows] (quantize_rows_kernel, a row being
# one group); weight and scales float32 [outer] (quantize); bias float32 [outer] or 0; y float32
# [rows, outer]. inner and outer are multiples of 64. configurations: tiles alone need them.
_ARGUMENTS = "rows x row_scales sums weight scales bias y inner outer configurations"
int8_tile_linear = Kernel(_int8_tile_linear, _ARGUMENTS, chunks=_chunks)
int8_vector_linear = Kernel(_int8_vector_linear, _ARGUMENTS, chunks=_chunks)
int8_plain_linear = Kernel(_int8_plain_linear, _ARGUMENTS, chunks=_chunks)
