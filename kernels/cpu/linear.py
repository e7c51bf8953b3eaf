"""y = x W' + b, for few rows (dot products, any element type) and on matrix tiles (bfloat16, any
number of rows).

Both read each weight once per step from memory, which is what bounds a decode step. Results are
float32.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from . import tiles
from .openmp import FLAGS, Chunks, Kernel
from .scalars import pointer, widen

F32 = np.float32(0)
CACHED_BYTES = (
    512 << 10
)  # of weights that stay in a core's second-level cache while all rows pass by


def linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference. float32 [T, N]."""
    y_TN = x_TK.float() @ weight_NK.float().T
    return y_TN if bias_N is None else y_TN + bias_N.float()


@njit(fastmath=FLAGS, error_model="numpy")
def dots(x, weight, bias, has_bias, y, first, last):
    """y[:, first:last], four outputs at a time so that each x is widened once for four weights."""
    size = x.shape[1]
    n = first
    while n + 4 <= last:
        w0, w1, w2, w3 = weight[n], weight[n + 1], weight[n + 2], weight[n + 3]
        for t in range(x.shape[0]):
            row = x[t]
            a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for k in range(size):
                value = widen(row[k])
                a += value * widen(w0[k])
                b += value * widen(w1[k])
                c += value * widen(w2[k])
                d += value * widen(w3[k])
            y[t, n], y[t, n + 1], y[t, n + 2], y[t, n + 3] = a, b, c, d
        n += 4
    while n < last:
        w0 = weight[n]
        for t in range(x.shape[0]):
            row = x[t]
            a = np.float32(0)
            for k in range(size):
                a += widen(row[k]) * widen(w0[k])
            y[t, n] = a
        n += 1
    if has_bias:
        for t in range(x.shape[0]):
            for n in range(first, last):
                y[t, n] += bias[n]


def _row_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    x = carray(pointer(a.x, a.element), (rows, a.inner))
    weight = carray(pointer(a.weight, a.element), (a.outer, a.inner))
    bias = carray(pointer(a.bias, F32), (a.outer,))
    y = carray(pointer(a.y, F32), (rows, a.outer))
    first, last = a.outer * chunk // chunks, a.outer * (chunk + 1) // chunks
    dots(x, weight, bias, a.bias != 0, y, first, last)


# rows: address of the number of rows. x [rows, inner], weight [outer, inner], bias float32 [outer]
# or 0, y float32 [rows, outer].
row_linear = Kernel(
    _row_linear, "rows x weight bias y inner outer", chunks=lambda a: Chunks(-(-a["outer"] // 4))
)


@njit(error_model="numpy")
def _start(accumulators, bias, n):
    """Zero, or the bias in every row (a stride of 0), in the accumulators of n .. n + 32."""
    if bias == 0:
        tiles.zero(0)
        tiles.zero(1)
        if accumulators == 4:
            tiles.zero(2)
            tiles.zero(3)
    else:
        tiles.load(0, bias + n * 4, 0)
        tiles.load(1, bias + n * 4 + 64, 0)
        if accumulators == 4:
            tiles.load(2, bias + n * 4, 0)
            tiles.load(3, bias + n * 4 + 64, 0)


@njit(error_model="numpy")
def tile_32(x, weight, bias, y, n, depth, outer):
    """17 to 32 rows by 32 columns: tiles 0 to 3 accumulate, 4 and 5 hold x, 6 and 7 weights."""
    stride, y_stride = depth * 64, outer * 4
    w = weight + (n // 16) * depth * 1024
    _start(4, bias, n)
    for k in range(depth):
        tiles.load(6, w + k * 1024, 64)
        tiles.load(7, w + (depth + k) * 1024, 64)
        tiles.load(4, x + k * 64, stride)
        tiles.load(5, x + 16 * stride + k * 64, stride)
        tiles.multiply(0, 4, 6)
        tiles.multiply(1, 4, 7)
        tiles.multiply(2, 5, 6)
        tiles.multiply(3, 5, 7)
    place = y + n * 4
    tiles.store(0, place, y_stride)
    tiles.store(1, place + 64, y_stride)
    tiles.store(2, place + 16 * y_stride, y_stride)
    tiles.store(3, place + 16 * y_stride + 64, y_stride)


@njit(error_model="numpy")
def tile_16(x, weight, bias, y, n, depth, outer):
    """1 to 16 rows by 32 columns."""
    stride, y_stride = depth * 64, outer * 4
    w = weight + (n // 16) * depth * 1024
    _start(2, bias, n)
    for k in range(depth):
        tiles.load(6, w + k * 1024, 64)
        tiles.load(7, w + (depth + k) * 1024, 64)
        tiles.load(4, x + k * 64, stride)
        tiles.multiply(0, 4, 6)
        tiles.multiply(1, 4, 7)
    tiles.store(0, y + n * 4, y_stride)
    tiles.store(1, y + n * 4 + 64, y_stride)


def _tile_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    depth, pairs = a.inner // 32, a.outer // 32
    first, last = pairs * chunk // chunks, pairs * (chunk + 1) // chunks
    some = max(1, CACHED_BYTES // (depth * 2048))
    while first < last:
        end = min(first + some, last)
        t = 0
        while t < rows:
            here = min(rows - t, 32)
            tiles.configure(a.configurations + (here - 1) * 64)
            x, y = a.x + t * a.inner * 2, a.y + t * a.outer * 4
            for pair in range(first, end):
                if here > 16:
                    tile_32(x, a.weight, a.bias, y, pair * 32, depth, a.outer)
                else:
                    tile_16(x, a.weight, a.bias, y, pair * 32, depth, a.outer)
            t += 32
        first = end
    tiles.release()


# As row_linear, with a packed weight (tiles.pack); inner and outer are multiples of 32, and x is 0
# beyond its own width.
tile_linear = Kernel(
    _tile_linear,
    "rows x weight bias y inner outer configurations",
    chunks=lambda a: Chunks(a["outer"] // 32),
)

CONFIGURATIONS = tiles.configurations(
    [
        [(min(rows, 16), 64)] * 2
        + [(max(rows - 16, 1), 64)] * 2  # accumulators
        + [(min(rows, 16), 64), (max(rows - 16, 1), 64)]  # x
        + [(16, 64)] * 2  # weights
        for rows in range(1, 33)
    ]
)
