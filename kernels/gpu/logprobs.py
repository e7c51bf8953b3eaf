"""Log-probabilities of given tokens, their ranks, and the likeliest tokens beside them.

A program reads one chunk of one row: its maximum and sum of exponentials, how many of its logits
are above the given token's, and its likeliest tokens, one after the other. The row's last program
to finish puts the chunks together. Of equals the lowest ids come first, whatever other rows want.

Letters: M rows wanted, N rows of logits, V vocabulary, C chunks, K likeliest tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sampling import clean_reference, is_last, pack_best, packed_score, packed_token
from .sampling_draws import clean

_BLOCK = 2048
_WIDTHS = (1, 8, 32)  # few kernels, all of which a start can compile
_NOTHING = tl.constexpr(-(2**63))


class Logprobs(NamedTuple):
    """The given token first, then the K likeliest: ids int32 [M, K + 1] (-1 where the vocabulary
    has no more), logprobs float32 [M, K + 1]. rank int32 [M]: 1 is the likeliest.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    rank: torch.Tensor


@triton.jit(
    do_not_specialize=["num_top"],
    # These may be parts of a tensor.
    do_not_specialize_on_alignment=["places", "chosen", "ids_out", "logprobs_out", "ranks_out"],
)
def _logprobs_kernel(
    logits, places, chosen, ids_out, logprobs_out, ranks_out, stats, candidates, arrived,
    stride, num_top, vocab_size,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chunk, m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(0)
    line = logits + tl.load(places + m).to(tl.int64) * stride
    token = tl.load(chosen + m)
    own = clean(tl.load(line + token))
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    there = ids < vocab_size
    x = clean(tl.load(line + ids, mask=there, other=float("-inf")))
    top = tl.max(x, 0)
    stat = stats + (m * num_chunks + chunk) * 3
    tl.store(stat, top)
    tl.store(stat + 1, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))
    tl.store(stat + 2, tl.sum((x > own).to(tl.float32), 0))
    packed = tl.where(there, pack_best(x, ids), _NOTHING)
    candidate = candidates + (m * num_chunks + chunk) * WIDTH
    i = num_top * 0
    while i < num_top:
        best = tl.max(packed, 0)
        tl.store(candidate + i, best)
        packed = tl.where(packed == best, _NOTHING, packed)
        i += 1
    if is_last(arrived + m, num_chunks):
        chunks = tl.arange(0, CHUNKS)
        every = stats + (m * num_chunks + chunks) * 3
        real = chunks < num_chunks
        tops = tl.load(every, real, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(every + 1, real, other=0.0, cache_modifier=".cg")
        above = tl.load(every + 2, real, other=0.0, cache_modifier=".cg")
        highest = tl.max(tops, 0)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(sums * tl.exp(tops - highest), 0)
        total = tl.log(tl.maximum(total, 1e-38)) + highest  # 0 if all are impossible
        tl.store(ranks_out + m, 1 + tl.sum(above, 0).to(tl.int32))
        ids_line = ids_out + m * (num_top + 1)
        logprobs_line = logprobs_out + m * (num_top + 1)
        tl.store(ids_line, token)
        tl.store(logprobs_line, tl.where(own == float("-inf"), own, own - total))
        at = tl.arange(0, CHUNKS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        column = tl.zeros([CHUNKS, WIDTH], tl.int32) + tl.arange(0, WIDTH)[None, :]
        present = (at < num_chunks * WIDTH) & (column < num_top)
        nothing = tl.full([CHUNKS, WIDTH], _NOTHING, tl.int64)
        rest = tl.load(
            candidates + m * num_chunks * WIDTH + at,
            mask=present,
            other=nothing,
            cache_modifier=".cg",
        )
        i = num_top * 0
        while i < num_top:
            best = tl.max(tl.max(rest, 1), 0)
            is_token = best != _NOTHING
            score = tl.where(is_token, packed_score(best), float("-inf"))
            tl.store(ids_line + 1 + i, tl.where(is_token, packed_token(best), -1))
            logprob = tl.where(score == float("-inf"), score, score - total)
            tl.store(logprobs_line + 1 + i, logprob)
            rest = tl.where(rest == best, _NOTHING, rest)
            i += 1


def token_logprobs(
    logits_NV: torch.Tensor,
    places_M: torch.Tensor,
    chosen_M: torch.Tensor,
    num_top: int,
    *,
    vocab_size: int,
) -> Logprobs:
    """Of the rows `places_M` of the logits (int32), log-probabilities of `chosen_M` (int32, below
    vocab_size) and of the num_top (at most 32) likeliest. The three tensors share one storage, the
    one of `ids`, in the order of their names.
    """
    num_rows, device = len(places_M), logits_NV.device
    assert logits_NV.stride(1) == 1
    assert num_top <= _WIDTHS[-1]
    size = num_rows * (num_top + 1)
    storage = torch.empty(2 * size + num_rows, dtype=torch.int32, device=device)
    out = Logprobs(
        storage[:size].view(num_rows, num_top + 1),
        storage[size : 2 * size].view(torch.float32).view(num_rows, num_top + 1),
        storage[2 * size :],
    )
    if not num_rows:
        return out
    chunks = triton.cdiv(vocab_size, _BLOCK)
    width = next(width for width in _WIDTHS if width >= num_top)
    _logprobs_kernel[(chunks, num_rows)](
        logits_NV, places_M, chosen_M, *out,
        torch.empty(num_rows * chunks * 3, dtype=torch.float32, device=device),
        torch.empty(num_rows * chunks * width, dtype=torch.int64, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        logits_NV.stride(0), num_top, vocab_size,
        BLOCK=_BLOCK, CHUNKS=triton.next_power_of_2(chunks), WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out


def token_logprobs_reference(
    logits_NV: torch.Tensor,
    places_M: torch.Tensor,
    chosen_M: torch.Tensor,
    num_top: int,
    *,
    vocab_size: int,
) -> Logprobs:
    x = clean_reference(logits_NV[places_M.long(), :vocab_size])
    raw = x.log_softmax(-1)
    own = raw.gather(1, chosen_M.long()[:, None])
    some = min(num_top, vocab_size)
    top = x.sort(dim=-1, descending=True, stable=True).indices[:, :some]
    ids = torch.full((len(x), num_top + 1), -1, dtype=torch.int32, device=x.device)
    logprobs = torch.full(ids.shape, -torch.inf, device=x.device)
    ids[:, 0], logprobs[:, :1] = chosen_M, own
    ids[:, 1 : 1 + some], logprobs[:, 1 : 1 + some] = top.int(), raw.gather(1, top)
    above = x > x.gather(1, chosen_M.long()[:, None])
    return Logprobs(ids, logprobs, 1 + above.sum(-1).int())
