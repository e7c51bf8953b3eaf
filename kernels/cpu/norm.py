"""Residual addition and RMSNorm (Zhang and Sennrich, 2019) in one pass. Where the model has it,
what is added has an RMSNorm of its own before.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from .openmp import FLAGS, Kernel
from .scalars import narrow, pointer

F32 = np.float32(0)
I32 = np.int32(0)


def add_rms_norm(
    hidden_TH: torch.Tensor,
    update_TH: torch.Tensor | None,
    weight_H: torch.Tensor,
    eps: float,
    update_weight_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference. Adds `update` (normalised with its weight, if there is one) to `hidden` in place
    and returns the norm of the sum, float32 [T, H].
    """
    if update_TH is not None and update_weight_H is not None:
        update_TH = add_rms_norm(update_TH.clone(), None, update_weight_H, eps)
    if update_TH is not None:
        hidden_TH += update_TH
    variance_T1 = hidden_TH.float().pow(2).mean(-1, keepdim=True)
    return hidden_TH * torch.rsqrt(variance_T1 + eps) * weight_H.float()


@njit(fastmath=FLAGS, error_model="numpy")
def _row(hidden, update, has_update, update_weight, has_weight, weight, out, size, eps):
    total = np.float32(0)
    if has_weight:
        for i in range(size):
            total += update[i] * update[i]
        scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            hidden[i] += update[i] * scale * update_weight[i]
        total = np.float32(0)
    elif has_update:
        for i in range(size):
            hidden[i] += update[i]
    for i in range(size):
        total += hidden[i] * hidden[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        out[i] = narrow(hidden[i] * scale * weight[i], out[i])


def _add_rms_norm(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    weight = carray(pointer(a.weight, F32), (a.size,))
    update_weight = carray(pointer(a.update_weight, F32), (a.size,))
    index = carray(pointer(a.index, I32), (rows,))
    for t in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
        row = np.int64(index[t]) if a.index else t
        hidden = carray(pointer(a.hidden + row * a.size * 4, F32), (a.size,))
        update = carray(pointer(a.update + row * a.update_stride * 4, F32), (a.size,))
        out = carray(pointer(a.out + t * a.out_bytes, a.element), (a.size,))
        _row(
            hidden,
            update,
            a.update != 0,
            update_weight,
            a.update_weight != 0,
            weight,
            out,
            a.size,
            a.eps,
        )


# hidden float32 [tokens, size]; update float32 [tokens, update_stride] or 0; update_weight float32
# [size], or 0 to add the update as it is; weight float32 [size];
# out [rows, ...] of out_bytes a row. index int32 [rows]: the tokens that are wanted, or 0 for all
# of them in order.
add_rms_norm_kernel = Kernel(
    _add_rms_norm,
    "rows index hidden update update_weight weight out size update_stride out_bytes",
    "eps",
)
