"""The gated activations of the feed-forward layer, silu(gate) * up and gelu(gate) * up (Shazeer,
2020). gelu is the approximation by tanh: 0.5 (1 + tanh(y)) is 1 / (1 + e**(-2 y)).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import carray, njit

from .openmp import FLAGS, Chunks, Kernel
from .scalars import exp, narrow, pointer

F32 = np.float32(0)
PART = 768  # of a row: what is worth handing to another thread
CUBE = np.float32(0.044715)
TWICE = np.float32(2 * (2 / np.pi) ** 0.5)


def silu_mul(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """Reference. [T, 2I], gates first, to float32 [T, I]."""
    gate_TI, up_TI = gate_up_TI.float().chunk(2, -1)
    return torch.nn.functional.silu(gate_TI) * up_TI


def gelu_mul(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """Reference. [T, 2I], gates first, to float32 [T, I]."""
    gate_TI, up_TI = gate_up_TI.float().chunk(2, -1)
    return torch.nn.functional.gelu(gate_TI, approximate="tanh") * up_TI


@njit(fastmath=FLAGS, error_model="numpy")
def _silu_row(gate, up, out):
    for i in range(out.shape[0]):
        out[i] = narrow(gate[i] * up[i] / (np.float32(1) + exp(-gate[i])), out[i])


@njit(fastmath=FLAGS, error_model="numpy")
def _gelu_row(gate, up, out):
    for i in range(out.shape[0]):
        twice = TWICE * (gate[i] + CUBE * gate[i] * gate[i] * gate[i])
        out[i] = narrow(gate[i] * up[i] / (np.float32(1) + exp(-twice)), out[i])


@njit(error_model="numpy")
def _part(a, piece):
    """Gates, ups and outputs of the given piece of the work."""
    parts = -(-a.size // PART)
    t, part = piece // parts, piece % parts
    first, last = part * PART, min((part + 1) * PART, a.size)
    gate = a.gate_up + (t * a.stride + first) * 4
    return (
        carray(pointer(gate, F32), (last - first,)),
        carray(pointer(gate + a.size * 4, F32), (last - first,)),
        carray(pointer(a.out + t * a.out_bytes, a.element), (a.size,))[first:last],
    )


def _silu_mul(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    pieces = rows * -(-a.size // PART)
    for piece in range(pieces * chunk // chunks, pieces * (chunk + 1) // chunks):
        gate, up, out = _part(a, piece)
        _silu_row(gate, up, out)


def _gelu_mul(p, chunk, chunks):
    a = carray(p, 1)[0]
    rows = carray(pointer(a.rows, a.rows), (1,))[0]
    pieces = rows * -(-a.size // PART)
    for piece in range(pieces * chunk // chunks, pieces * (chunk + 1) // chunks):
        gate, up, out = _part(a, piece)
        _gelu_row(gate, up, out)


# gate_up float32 [rows, stride]: `size` gates, then `size` ups; out [rows, ...] of out_bytes a row.
def _kernel(body: Callable[..., None]) -> Kernel:
    return Kernel(
        body,
        "rows gate_up out size stride out_bytes",
        chunks=lambda a: Chunks(a["rows"], -(-a["size"] // PART)),
    )


silu_mul_kernel = _kernel(_silu_mul)
gelu_mul_kernel = _kernel(_gelu_mul)
