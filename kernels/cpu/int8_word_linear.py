"""y = x W' + b with x as words of 16 bits and W as bytes (quantize.py), for any number of rows:
with AVX2 (blocks.py).

Both bytes of int8_linear.py's x in one number: half the products, but sums that are as long as
int32 only for some inputs. These are whole numbers and exact; they are added up in float32, in the
order of the inputs. So a row's result doesn't depend on how many rows there are, nor on the others;
it is not bit for bit that of int8_linear.py.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from . import blocks, vectors
from .openmp import Chunks, Kernel, thread_number
from .scalars import pointer

F32 = np.float32(0)

STEP = 512  # inputs whose products fit: 512 * 127 * 32,767 < 2**31
MOST_ROWS = 6  # that are computed together, in 12 of 16 registers
CACHED_BYTES = 192 << 10  # of weights that stay in a second-level cache while all rows pass by
SCRATCH_BYTES = 2 * MOST_ROWS * 64  # for each thread: sums of some inputs, and of all so far
_PAIR = 32  # outputs that a chunk of work is a multiple of


def int8_word_linear(
    q_TK: torch.Tensor,
    row_scales_T: torch.Tensor,
    weight_NK: torch.Tensor,
    scales_N: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference. float32 [T, N] from int16 rows and signed bytes of weights, bit for bit."""
    total_TN = torch.zeros(len(q_TK), len(weight_NK))
    for q, weight in zip(q_TK.split(STEP, 1), weight_NK.split(STEP, 1), strict=True):
        total_TN += (q.long() @ weight.long().T).float()
    y_TN = total_TN * row_scales_T[:, None] * scales_N
    return y_TN if bias_N is None else y_TN + bias_N


@njit(error_model="numpy")
def _multiply(here, count, x, stride, w, w_stride, pairs, sums):
    """`count` strips, of which there are more than one for few rows alone."""
    if here == 1:
        if count == 4:
            blocks.multiply_words(1, 4, x, stride, w, w_stride, pairs, sums)
        else:
            blocks.multiply_words(1, 2, x, stride, w, w_stride, pairs, sums)
    elif here == 2:
        blocks.multiply_words(2, 2, x, stride, w, w_stride, pairs, sums)
    elif here == 3:
        blocks.multiply_words(3, 1, x, stride, w, w_stride, pairs, sums)
    elif here == 4:
        blocks.multiply_words(4, 1, x, stride, w, w_stride, pairs, sums)
    elif here == 5:
        blocks.multiply_words(5, 1, x, stride, w, w_stride, pairs, sums)
    else:
        blocks.multiply_words(6, 1, x, stride, w, w_stride, pairs, sums)


@njit(error_model="numpy")
def _finish(a, t, here, strip, count, totals):
    row_scales = carray(pointer(a.row_scales + t * 4, F32), (here,))
    for i in range(count):
        n = (strip + i) * 16
        scales = vectors.load_real(a.scales + n * 4)
        for row in range(here):
            total = vectors.load_real(totals + (row * count + i) * 64)
            y = vectors.multiply(vectors.multiply(total, vectors.spread(row_scales[row])), scales)
            if a.bias:
                y = vectors.add(y, vectors.load_real(a.bias + n * 4))
            vectors.store(a.y + ((t + row) * a.outer + n) * 4, y)


@njit(error_model="numpy")
def _block(a, t, here, first, last, scratch):
    """Rows t .. t + here by the strips first .. last of 16 outputs, an even number of them."""
    stride, w_stride = a.inner * 2, a.inner * 16
    sums, totals, strip = scratch, scratch + MOST_ROWS * 64, first
    while strip < last:
        count = 4 if here == 1 and last - strip >= 4 else (2 if here <= 2 else 1)
        for k in range(0, a.inner, STEP):
            x, w = a.x + t * stride + k * 2, a.weight + strip * w_stride + k * 16
            _multiply(here, count, x, stride, w, w_stride, min(STEP, a.inner - k) // 2, sums)
            for place in range(0, here * count * 64, 64):
                total = vectors.to_real(vectors.load(sums + place))
                if k:
                    total = vectors.add(vectors.load_real(totals + place), total)
                vectors.store(totals + place, total)
        _finish(a, t, here, strip, count, totals)
        strip += count


def _int8_word_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    pairs, some = a.outer // _PAIR, max(1, CACHED_BYTES // (a.inner * _PAIR))
    first, last = pairs * chunk // chunks, pairs * (chunk + 1) // chunks
    scratch = a.scratch + np.int64(thread_number()) * SCRATCH_BYTES
    while first < last:
        end = min(first + some, last)
        t, left = 0, -(-rows // MOST_ROWS)
        while left:
            here = -(-(rows - t) // left)
            _block(a, t, here, 2 * first, 2 * end, scratch)
            t += here
            left -= 1
        first = end


# x int16 [rows, inner] and row_scales float32 [rows] (row_words_kernel); weight and scales float32
# [outer] (quantize.pairs); bias float32 [outer] or 0; y float32 [rows, outer]. inner and outer are
# multiples of 64. scratch: SCRATCH_BYTES for each thread.
int8_word_linear_kernel = Kernel(
    _int8_word_linear,
    "rows x row_scales weight scales bias y inner outer scratch",
    chunks=lambda a: Chunks(a["outer"] // _PAIR),
)
