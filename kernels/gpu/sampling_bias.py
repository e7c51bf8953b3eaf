"""logit_bias: what requests add to the logits of single tokens.

Letters: N rows of logits, R rows of the batch, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_TILE = 256


class Biases(NamedTuple):
    """Of each row of the batch: where its list begins and how long it is (int32); of each element
    of a list: token id (int32, below V, once in a list) and bias (float32).
    """

    first_R: torch.Tensor
    number_R: torch.Tensor
    ids: torch.Tensor
    biases: torch.Tensor


@triton.jit
def _bias_kernel(logits, rows, firsts, numbers, ids, biases, stride, TILE: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n)
    if row < 0:
        return
    first, number = tl.load(firsts + row), tl.load(numbers + row)
    start = number * 0
    while start < number:
        at = start + tl.arange(0, TILE)
        there = at < number
        place = logits + n * stride + tl.load(ids + first + at, mask=there, other=0)
        bias = tl.load(biases + first + at, mask=there, other=0.0)
        tl.store(place, tl.load(place, mask=there, other=0.0) + bias, mask=there)
        start += TILE


def add_biases(logits_NV: torch.Tensor, rows_N: torch.Tensor, lists: Biases) -> None:
    """Add to float32 logits in place; rows of -1 are left out."""
    assert logits_NV.dtype == torch.float32
    assert logits_NV.stride(1) == 1
    if len(logits_NV):
        _bias_kernel[(len(logits_NV),)](
            logits_NV, rows_N, *lists, logits_NV.stride(0), TILE=_TILE, num_warps=4
        )


def add_biases_reference(logits_NV: torch.Tensor, rows_N: torch.Tensor, lists: Biases) -> None:
    for n, row in enumerate(rows_N.tolist()):
        if row >= 0:
            own = slice(int(lists.first_R[row]), int(lists.first_R[row] + lists.number_R[row]))
            logits_NV[n, lists.ids[own].long()] += lists.biases[own]
