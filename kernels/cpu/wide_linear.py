"""y = x W' + b with x in float32 and W in bfloat16, for processors that have no arithmetic for
bfloat16: weights are widened in registers, any number of rows at a time.

Each weight is read once from memory, in two bytes, and the sums are those of float32. A row's
result doesn't depend on how many rows there are, nor on the others.
"""

from __future__ import annotations

import torch
from numba import carray, njit

from . import blocks, vectors
from .openmp import Chunks, Kernel
from .scalars import pointer

MOST_ROWS = blocks.most_wide_rows()  # that are computed together
CACHED_BYTES = 192 << 10  # of weights that stay in a second-level cache while all rows pass by
_PAIR = 32  # outputs that a chunk of work is a multiple of


def wide_linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference. float32 [T, N], but for rounding."""
    y_TN = (x_TK.double() @ weight_NK.double().T).float()
    return y_TN if bias_N is None else y_TN + bias_N


@njit(error_model="numpy")
def _add_bias(a, rows, first, last):
    for t in range(rows):
        for strip in range(first, last):
            y = a.y + (t * a.outer + strip * 16) * 4
            bias = vectors.load_real(a.bias + strip * 64)
            vectors.store(y, vectors.add(vectors.load_real(y), bias))


def _wide_linear(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    pairs, some = a.outer // _PAIR, max(1, CACHED_BYTES // (a.inner * 2 * _PAIR))
    first, last = pairs * chunk // chunks, pairs * (chunk + 1) // chunks
    while first < last:
        end = min(first + some, last)
        t, left = 0, -(-rows // MOST_ROWS)
        while left:
            here = -(-(rows - t) // left)
            blocks.multiply_bfloat16(
                here,
                a.x + t * a.inner * 4,
                a.inner * 4,
                a.weight + first * a.inner * 64,
                a.inner * 32,
                2 * (end - first),
                a.inner // 2,
                a.y + (t * a.outer + first * 32) * 4,
                a.outer * 4,
            )
            t += here
            left -= 1
        if a.bias:
            _add_bias(a, rows, 2 * first, 2 * end)
        first = end


# x float32 [rows, inner], weight bfloat16 (tiles.pack), bias float32 [outer] or 0, y float32 [rows,
# outer]; inner and outer are multiples of 32.
wide_linear_kernel = Kernel(
    _wide_linear,
    "rows x weight bias y inner outer",
    chunks=lambda a: Chunks(a["outer"] // _PAIR),
)
