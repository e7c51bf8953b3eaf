"""Penalties on tokens that there are already: repetition, then frequency and presence.

Each step reads the row's known tokens where they are, so nothing is kept between steps, and a token
sampled a moment ago counts though the host has not seen it. One program takes one row: it adds its
tokens up in a table of counts, and then goes over them again. Whoever takes a count away, leaving
zero, penalises that token; so each is penalised once, and the table is zero again at the end.

The table has room for some rows only (counts int32 [G, V]); more rows take turns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS_AT_A_TIME = 32
_BLOCK = 1024
_IN_PROMPT = tl.constexpr(1 << 30)


def penalty_counts(max_rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """19 MB for a vocabulary of 151,936."""
    shape = (min(max_rows, _ROWS_AT_A_TIME), vocab_size)
    return torch.zeros(shape, dtype=torch.int32, device=device)


@triton.jit
def _penalties_kernel(
    logits, rows, positions, tokens, num_prompts, penalties, counts,
    stride, tokens_stride, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n).to(tl.int64)
    if row < 0:
        return
    repetition = tl.load(penalties + row * 3)
    frequency = tl.load(penalties + row * 3 + 1)
    presence = tl.load(penalties + row * 3 + 2)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    number, num_prompt = tl.load(positions + n), tl.load(num_prompts + row)
    table, line, known = counts + n * vocab_size, logits + n * stride, tokens + row * tokens_stride
    start = number * 0
    while start < number:
        at = start + tl.arange(0, BLOCK)
        token = tl.load(known + at, mask=at < number, other=-1)
        # A prompt may have tokens that have no logit.
        there = (token >= 0) & (token < vocab_size)
        flag = tl.full([BLOCK], _IN_PROMPT, tl.int32)
        tl.atomic_or(table + token, flag, mask=there & (at < num_prompt), sem="relaxed")
        tl.atomic_add(table + token, 1, mask=there & (at >= num_prompt), sem="relaxed")
        start += BLOCK
    tl.debug_barrier()
    start = number * 0
    while start < number:
        at = start + tl.arange(0, BLOCK)
        token = tl.load(known + at, mask=at < number, other=-1)
        there = (token >= 0) & (token < vocab_size)
        zeros = tl.zeros([BLOCK], tl.int32)
        count = tl.atomic_xchg(table + token, zeros, mask=there, sem="relaxed")
        mine = there & (count != 0)
        logit = tl.load(line + token, mask=mine, other=0.0)
        logit = tl.where(logit > 0.0, logit / repetition, logit * repetition)
        times = count & (_IN_PROMPT - 1)
        less = times.to(tl.float32) * frequency + presence
        tl.store(line + token, tl.where(times > 0, logit - less, logit), mask=mine)
        start += BLOCK


def penalise(
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor,
    positions_N: torch.Tensor,
    tokens_RL: torch.Tensor,
    num_prompt_R: torch.Tensor,
    penalties_R3: torch.Tensor,
    counts_GV: torch.Tensor,
    *,
    vocab_size: int,
) -> None:
    """Penalise float32 logits in place. rows, positions: the batch row of each and how many tokens
    it has; -1 is left out. penalties float32: repetition, frequency, presence of each batch row.
    counts_GV (`penalty_counts`) is zero between launches.
    """
    assert logits_NV.dtype == torch.float32
    assert logits_NV.stride(1) == 1
    for first in range(0, len(logits_NV), len(counts_GV)):
        rows = rows_N[first : first + len(counts_GV)]
        logits = logits_NV[first:]
        _penalties_kernel[(len(rows),)](
            logits, rows, positions_N[first:], tokens_RL, num_prompt_R, penalties_R3, counts_GV,
            logits_NV.stride(0), tokens_RL.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


def penalise_reference(
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor,
    positions_N: torch.Tensor,
    tokens_RL: torch.Tensor,
    num_prompt_R: torch.Tensor,
    penalties_R3: torch.Tensor,
    counts_GV: torch.Tensor | None = None,
    *,
    vocab_size: int,
) -> None:
    for n, (row, number) in enumerate(zip(rows_N.tolist(), positions_N.tolist(), strict=True)):
        if row < 0:
            continue
        known = tokens_RL[row, :number].long()
        output = known[int(num_prompt_R[row]) :]
        repetition, frequency, presence = penalties_R3[row].tolist()
        logits = logits_NV[n, :vocab_size]
        there = torch.bincount(known[known < vocab_size], minlength=vocab_size) > 0
        counts = torch.bincount(output[output < vocab_size], minlength=vocab_size)
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        less = counts * frequency + (counts > 0) * presence
        logits.copy_(torch.where(there, scaled, logits) - less)
