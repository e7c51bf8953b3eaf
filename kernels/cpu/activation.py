"""The gated activation of the feed-forward layer: silu(gate) * up (Shazeer, 2020)."""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, njit

from .openmp import FLAGS, Chunks, Kernel
from .scalars import exp, narrow, pointer

F32 = np.float32(0)
PART = 768  # of a row: what is worth handing to another thread


def silu_mul(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """Reference. [T, 2I], gates first, to float32 [T, I]."""
    gate_TI, up_TI = gate_up_TI.float().chunk(2, -1)
    return torch.nn.functional.silu(gate_TI) * up_TI


@njit(fastmath=FLAGS, error_model="numpy")
def _row(gate, up, out):
    for i in range(out.shape[0]):
        out[i] = narrow(gate[i] * up[i] / (np.float32(1) + exp(-gate[i])), out[i])


def _silu_mul(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    parts = -(-a.size // PART)
    for piece in range(rows * parts * chunk // chunks, rows * parts * (chunk + 1) // chunks):
        t, part = piece // parts, piece % parts
        first, last = part * PART, min((part + 1) * PART, a.size)
        gate = a.gate_up + (t * a.stride + first) * 4
        out = a.out + t * a.out_bytes
        _row(
            carray(pointer(gate, F32), (last - first,)),
            carray(pointer(gate + a.size * 4, F32), (last - first,)),
            carray(pointer(out, a.element), (a.size,))[first:last],
        )


# gate_up float32 [rows, stride]: `size` gates, then `size` ups; out [rows, ...] of out_bytes a row.
silu_mul_kernel = Kernel(
    _silu_mul,
    "rows gate_up out size stride out_bytes",
    chunks=lambda a: Chunks(a["rows"], -(-a["size"] // PART)),
)
