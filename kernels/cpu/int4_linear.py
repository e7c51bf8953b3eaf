"""y = x W' + b with x as bytes and W as halves of bytes, each with a scale for every 32 inputs
(quantize.py), for any number of rows: on matrix tiles, in vectors of 512 or 256 bits, or by plain
arithmetic.

The sum of each group's products is a whole number and exact. Groups are added up in float32, in
their order, by the one function that all kernels share (`_add_group`), and every step of it is
rounded as written. So all give the same result bit for bit, for every number of rows and whatever
the other rows are.

    y = scale * sum over groups of (x_scale * step * sum(x q) + base * x_scale * sum(x))
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from . import blocks, tiles, vectors
from .openmp import Chunks, Kernel, thread_number
from .quantize import COLUMNS, GROUP
from .scalars import pointer

F32 = np.float32(0)
U8 = np.uint8(0)

FEW_ROWS = 8  # up to here vectors are faster than tiles, which unpack to memory first
BLOCK_ROWS = blocks.MOST_HALVES_ROWS  # that vectors compute together
CACHED_BYTES = 256 << 10  # of unpacked weights that stay in a second-level cache while rows pass by
_TILE = 1024  # bytes


def int4_linear(
    q_TK: torch.Tensor,
    row_scales_TG: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference, from the dequantised weight. float32 [T, N], but for rounding."""
    x_TK = q_TK.unflatten(1, (-1, GROUP)).double() * row_scales_TG[..., None]
    y_TN = (x_TK.flatten(1) @ weight_NK.double().T).float()
    return y_TN if bias_N is None else y_TN + bias_N


def scratch_bytes(inner: int) -> int:
    """For each thread, for this (padded) inner size: three tiles, then unpacked strips."""
    return 3 * _TILE + max(CACHED_BYTES, inner * COLUMNS)


@njit(error_model="numpy")
def _add_group(y, sums, steps, bases, x_scale, x_total):
    """16 outputs of one row, and a group more. x_scale and x_total: addresses."""
    scaled = vectors.multiply(vectors.to_real(sums), vectors.broadcast_real(x_scale))
    y = vectors.multiply_add(scaled, steps, y)
    return vectors.multiply_add(vectors.broadcast_real(x_total), bases, y)


@njit(error_model="numpy")
def _steps(a, strip, g):
    return vectors.load_halves(a.groups + (strip * (a.inner // GROUP) + g) * 64)


@njit(error_model="numpy")
def _bases(a, strip, g):
    return vectors.load_halves(a.groups + (strip * (a.inner // GROUP) + g) * 64 + 32)


@njit(error_model="numpy")
def _finish(a, first, rows, strip, results, step):
    """y [first : first + rows, 16 outputs], once all groups are in: results of a row, `step` bytes
    after those of the one before. (Until then they are collected in scratch, because the rows of y
    may all lie in one set of the cache.)
    """
    n = strip * COLUMNS
    scales = vectors.load_real(a.scales + n * 4)
    for t in range(rows):
        y = vectors.multiply(vectors.load_real(results + t * step), scales)
        if a.bias:
            y = vectors.add(y, vectors.load_real(a.bias + n * 4))
        vectors.store(a.y + ((first + t) * a.outer + n) * 4, y)


@njit(error_model="numpy")
def _unpack(packed, out, count):
    """`count` times 64 bytes become 128."""
    halves = carray(pointer(packed, U8), (count, 64))
    whole = carray(pointer(out, U8), (count, 2, 64))
    for i in range(count):
        for j in range(64):
            whole[i, 0, j] = halves[i, j] & np.uint8(15)
        for j in range(64):
            whole[i, 1, j] = halves[i, j] >> np.uint8(4)


@njit(error_model="numpy")
def _tile_rows(a, first, rows, strip, weights, scratch):
    """Up to 16 rows by 16 outputs, two groups at a time: tiles 0 and 1 have their sums, 2 and 3 x,
    4 and 5 weights.
    """
    x, num_groups = a.x + first * a.inner, a.inner // GROUP
    sums, results = scratch, scratch + 2 * _TILE
    for t in range(rows):
        vectors.store(results + t * 64, vectors.zeros())
    for g in range(0, num_groups, 2):
        tiles.zero(0)
        tiles.zero(1)
        tiles.load(2, x + g * GROUP, a.inner)
        tiles.load(3, x + (g + 1) * GROUP, a.inner)
        tiles.load(4, weights + g * 512, 64)
        tiles.load(5, weights + (g + 1) * 512, 64)
        tiles.multiply_bytes(0, 2, 4)
        tiles.multiply_bytes(1, 3, 5)
        tiles.store(0, sums, 64)
        tiles.store(1, sums + _TILE, 64)
        steps0, bases0 = _steps(a, strip, g), _bases(a, strip, g)
        steps1, bases1 = _steps(a, strip, g + 1), _bases(a, strip, g + 1)
        own = (first * num_groups + g) * 4
        for t in range(rows):
            place = t * 64
            sums0, sums1 = vectors.load(sums + place), vectors.load(sums + _TILE + place)
            y = vectors.load_real(results + place)
            y = _add_group(y, sums0, steps0, bases0, a.row_scales + own, a.totals + own)
            y = _add_group(y, sums1, steps1, bases1, a.row_scales + own + 4, a.totals + own + 4)
            vectors.store(results + place, y)
            own += num_groups * 4
    _finish(a, first, rows, strip, results, 64)


@njit(error_model="numpy")
def _tile_linear(a, rows, first, last, scratch):
    whole, packed = a.inner * COLUMNS, a.inner * COLUMNS // 2
    weights, some = scratch + 3 * _TILE, max(1, CACHED_BYTES // whole)
    while first < last:
        end = min(first + some, last)
        _unpack(a.weight + first * packed, weights, (end - first) * packed // 64)
        for t in range(0, rows, 16):
            here = min(rows - t, 16)
            tiles.configure(a.configurations + (here - 1) * 64)
            for strip in range(first, end):
                _tile_rows(a, t, here, strip, weights + (strip - first) * whole, scratch)
        first = end
    tiles.release()


@njit(error_model="numpy")
def _plain_group(x, packed):
    total = vectors.zeros()
    for i in range(GROUP // 8):
        both, four = vectors.load(packed + i * 64), vectors.broadcast(x + i * 8)
        total = vectors.add_products(total, vectors.low(both), four)
        four = vectors.broadcast(x + i * 8 + 4)
        total = vectors.add_products(total, vectors.high(both), four)
    return total


@njit(error_model="numpy")
def _plain_rows(a, first, rows, strip, results):
    num_groups = a.inner // GROUP
    for t in range(rows):
        x, y = a.x + (first + t) * a.inner, vectors.as_real(vectors.zeros())
        own = (first + t) * num_groups * 4
        for g in range(num_groups):
            sums = _plain_group(x + g * GROUP, a.weight + (strip * num_groups + g) * 256)
            steps, bases = _steps(a, strip, g), _bases(a, strip, g)
            y = _add_group(y, sums, steps, bases, a.row_scales + own, a.totals + own)
            own += 4
        vectors.store(results + t * 64, y)
    _finish(a, first, rows, strip, results, 64)


@njit(error_model="numpy")
def _work(a, chunk, chunks):
    """The number of rows, the strips of this chunk, this thread's scratch."""
    rows, strips = carray(pointer(a.rows, a.rows), (1,))[0], a.outer // COLUMNS
    scratch = a.scratch + np.int64(thread_number()) * a.scratch_bytes
    return rows, strips * chunk // chunks, strips * (chunk + 1) // chunks, scratch


@njit(error_model="numpy")
def _operands(a, t, strip):
    """What blocks.multiply_halves reads from row t and this strip on."""
    num_groups = a.inner // GROUP
    own = t * num_groups * 4
    return (
        a.x + t * a.inner,
        a.inner,
        a.row_scales + own,
        a.totals + own,
        num_groups * 4,
        a.weight + strip * num_groups * 256,
        num_groups * 256,
        a.groups + strip * num_groups * 64,
        num_groups * 64,
        num_groups,
    )


@njit(error_model="numpy")
def _block_512(a, t, here, strip, results):
    """Rows t .. t + here by two strips."""
    blocks.multiply_halves_512(here, results, *_operands(a, t, strip))
    _finish(a, t, here, strip, results, 128)
    _finish(a, t, here, strip + 1, results + 64, 128)


@njit(error_model="numpy")
def _vector_linear(a, rows, chunk, chunks, scratch):
    pairs, some = a.outer // (2 * COLUMNS), max(1, CACHED_BYTES // (a.inner * 2 * COLUMNS))
    first, last = pairs * chunk // chunks, pairs * (chunk + 1) // chunks
    while first < last:
        end = min(first + some, last)
        t, left = 0, -(-rows // BLOCK_ROWS)
        while left:
            here = -(-(rows - t) // left)
            for pair in range(first, end):
                _block_512(a, t, here, 2 * pair, scratch)
            t += here
            left -= 1
        first = end


def _int4_tile_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows, first, last, scratch = _work(a, chunk, chunks)
    if rows <= FEW_ROWS:
        _vector_linear(a, rows, chunk, chunks, scratch)
    else:
        _tile_linear(a, rows, first, last, scratch)


def _int4_vector_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows, _, _, scratch = _work(a, chunk, chunks)
    _vector_linear(a, rows, chunk, chunks, scratch)


def _int4_plain_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows, first, last, scratch = _work(a, chunk, chunks)
    for strip in range(first, last):
        for t in range(0, rows, FEW_ROWS):
            _plain_rows(a, t, min(rows - t, FEW_ROWS), strip, scratch)


@njit(error_model="numpy")
def _block(a, t, here, strip, results):
    """Rows t .. t + here by a strip."""
    blocks.multiply_halves(here, results, *_operands(a, t, strip))
    _finish(a, t, here, strip, results, 64)


def _int4_block_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows, first, last, scratch = _work(a, chunk, chunks)
    some = max(1, CACHED_BYTES // (a.inner * COLUMNS))
    while first < last:
        end = min(first + some, last)
        t, left = 0, -(-rows // BLOCK_ROWS)
        while left:
            here = -(-(rows - t) // left)
            for strip in range(first, end):
                _block(a, t, here, strip, scratch)
            t += here
            left -= 1
        first = end


def _chunks(arguments: dict[str, object]) -> Chunks:
    return Chunks(arguments["outer"] // COLUMNS)


# x int8 [rows, inner], row_scales and totals float32 [rows, inner / 32] (quantize_rows_kernel);
# weight, groups and scales float32 [outer] (quantize); bias float32 [outer] or 0; y float32 [rows,
# outer]. inner and outer are multiples of 64. scratch: scratch_bytes for each thread.
# configurations: of tiles, which alone need them.
_ARGUMENTS = (
    "rows x row_scales totals weight groups scales bias y inner outer scratch scratch_bytes "
    "configurations"
)
int4_tile_linear = Kernel(_int4_tile_linear, _ARGUMENTS, chunks=_chunks)
int4_vector_linear = Kernel(_int4_vector_linear, _ARGUMENTS, chunks=_chunks)
int4_block_linear = Kernel(_int4_block_linear, _ARGUMENTS, chunks=_chunks)
int4_plain_linear = Kernel(_int4_plain_linear, _ARGUMENTS, chunks=_chunks)

CONFIGURATIONS = tiles.configurations(
    [[(rows, 64)] * 2 + [(rows, 32)] * 2 + [(8, 64)] * 2 + [(0, 0)] * 2 for rows in range(1, 17)]
)
