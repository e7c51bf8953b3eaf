"""The embedding of tokens, times a number (1 for most models), from a table in rows or from the
tiles of an output layer that shares its weights.

The table may be a part of a larger one's, from row `first` on: other tokens' embeddings are zeros.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from .openmp import Kernel
from .scalars import pointer, widen

F32 = np.float32(0)
I32 = np.int32(0)
BF16 = np.uint16(0)  # as scalars.py holds it


def embedding(
    token_ids_T: torch.Tensor, weight_VH: torch.Tensor, scale: float = 1.0, first: int = 0
) -> torch.Tensor:
    """Reference. float32 [T, H]."""
    row_T = token_ids_T - first
    is_here_T1 = ((row_T >= 0) & (row_T < len(weight_VH)))[:, None]
    return torch.where(is_here_T1, weight_VH[row_T.clamp(0, len(weight_VH) - 1)].float() * scale, 0)


@njit(error_model="numpy")
def _rows(a, weight, chunk, chunks):
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    token_ids = carray(pointer(a.token_ids, I32), (rows,))
    out = carray(pointer(a.out, F32), (rows, a.size))
    for t in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        token = token_ids[t] - a.first
        if 0 <= token < a.vocabulary:
            for i in range(a.size):
                out[t, i] = widen(weight[token, i]) * a.scale
        else:
            out[t, :] = 0.0


def _row_embedding(p, chunk, chunks):
    a = carray(p, 1)[0]
    _rows(a, carray(pointer(a.weight, a.element), (a.vocabulary, a.size)), chunk, chunks)


def _bfloat16_embedding(p, chunk, chunks):
    a = carray(p, 1)[0]
    _rows(a, carray(pointer(a.weight, BF16), (a.vocabulary, a.size)), chunk, chunks)


# token_ids int32 [rows]; weight [vocabulary, size]; out float32 [rows, size].
_ARGUMENTS = "rows token_ids weight out first vocabulary size"
row_embedding = Kernel(_row_embedding, _ARGUMENTS, "scale")

# The same with a weight in bfloat16, whatever the model's element type.
bfloat16_embedding = Kernel(_bfloat16_embedding, _ARGUMENTS, "scale")


def _tile_embedding(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    token_ids = carray(pointer(a.token_ids, I32), (rows,))
    pairs = -(-a.size // 32) * 16
    weight = carray(pointer(a.weight, BF16), (-(-a.vocabulary // 16), pairs, 16, 2))
    out = carray(pointer(a.out, F32), (rows, a.size))
    for t in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        token = token_ids[t] - a.first
        if 0 <= token < a.vocabulary:
            group, column = token // 16, token % 16
            for i in range(a.size):
                out[t, i] = widen(weight[group, i // 2, column, i % 2]) * a.scale
        else:
            out[t, :] = 0.0


# The same with a packed weight (tiles.pack).
tile_embedding = Kernel(_tile_embedding, _ARGUMENTS, "scale")
