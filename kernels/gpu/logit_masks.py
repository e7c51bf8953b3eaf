"""Tokens that are impossible: their logits become -inf, in whatever type they are.

`mask_all_but_allowed` takes a bit for each token, of the rows that have such a mask (a list of
allowed tokens, or a grammar). `forbid` takes lists: stop tokens until enough tokens exist, and the
last token of each bad word where the output ends with those before it.

Letters: N rows of logits, R rows of the batch, L longest sequence, V vocabulary, W words of bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_TILE = 128


class StopTokens(NamedTuple):
    """Of each row of the batch: the place in the sequence from which stops are possible, and where
    its list of them begins in `ids` and how long it is. All int32.
    """

    from_R: torch.Tensor
    first_R: torch.Tensor
    number_R: torch.Tensor
    ids: torch.Tensor


class BadWords(NamedTuple):
    """Of each row of the batch: its first word, how many it has, the length of its longest, and
    where the tokens of its words begin in `tokens`. Of each word: where its tokens begin among
    those of its row, and how many there are. All int32.
    """

    first_R: torch.Tensor
    number_R: torch.Tensor
    longest_R: torch.Tensor
    tokens_first_R: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tokens: torch.Tensor


@triton.jit
def _allowed_kernel(
    logits, rows, masked, allowed, stride, num_words, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + n).to(tl.int64)
    if row < 0:
        return
    if tl.load(masked + row) == 0:
        return
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    there = ids < vocab_size
    word = tl.load(allowed + row * num_words + ids // 32, mask=there, other=-1)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    impossible = tl.full([BLOCK], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + n * stride + ids, impossible, mask=there & forbidden)


@triton.jit
def _forbid_kernel(
    logits, rows, positions, tokens, num_prompts,
    stops_from, stop_firsts, stop_numbers, stop_ids,
    word_firsts, word_numbers, longests, tokens_firsts, word_starts, word_lengths, word_tokens,
    stride, tokens_stride, vocab_size, TILE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n).to(tl.int64)
    if row < 0:
        return
    line, known = logits + n * stride, tokens + row * tokens_stride
    position, num_prompt = tl.load(positions + n), tl.load(num_prompts + row)
    impossible = tl.full([TILE], float("-inf"), logits.dtype.element_ty)
    if position < tl.load(stops_from + row):
        first, number = tl.load(stop_firsts + row), tl.load(stop_numbers + row)
        start = number * 0
        while start < number:
            at = start + tl.arange(0, TILE)
            stop = tl.load(stop_ids + first + at, mask=at < number, other=vocab_size)
            tl.store(line + stop, impossible, mask=stop < vocab_size)
            start += TILE
    first_word, num_words = tl.load(word_firsts + row), tl.load(word_numbers + row)
    longest, tokens_first = tl.load(longests + row), tl.load(tokens_firsts + row)
    word = num_words * 0
    while word < num_words:
        at = word + tl.arange(0, TILE)
        found = at < num_words
        length = tl.load(word_lengths + first_word + at, mask=found, other=0)
        last = tl.load(word_starts + first_word + at, mask=found, other=0) + length - 1
        last += tokens_first
        back = longest * 0 + 1
        while back < longest:
            inside = found & (back < length)
            # A word doesn't begin in the prompt.
            there = position - back >= num_prompt
            token = tl.load(word_tokens + last - back, mask=inside, other=-1)
            before = tl.load(known + position - back, mask=there, other=-2)
            found = found & ((back >= length) | (token == before))
            back += 1
        token = tl.load(word_tokens + last, mask=found, other=vocab_size)
        tl.store(line + token, impossible, mask=found & (token < vocab_size))
        word += TILE


def mask_all_but_allowed(
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor,
    masked_R: torch.Tensor,
    allowed_RW: torch.Tensor,
    *,
    vocab_size: int,
) -> None:
    """masked int32: whether a batch row has a mask. allowed int32: bit i % 32 of word i // 32 says
    that token i is possible. rows of -1 are left out.
    """
    assert logits_NV.stride(1) == 1
    assert allowed_RW.shape[1] * 32 >= vocab_size
    if len(logits_NV):
        _allowed_kernel[(triton.cdiv(vocab_size, _BLOCK), len(logits_NV))](
            logits_NV, rows_N, masked_R, allowed_RW,
            logits_NV.stride(0), allowed_RW.stride(0), vocab_size, BLOCK=_BLOCK,
        )  # fmt: skip


def mask_all_but_allowed_reference(
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor,
    masked_R: torch.Tensor,
    allowed_RW: torch.Tensor,
    *,
    vocab_size: int,
) -> None:
    bits = torch.arange(32, dtype=torch.int32, device=logits_NV.device)
    for n, row in enumerate(rows_N.tolist()):
        if row >= 0 and masked_R[row]:
            allowed = ((allowed_RW[row, :, None] >> bits) & 1).flatten()[:vocab_size]
            logits_NV[n, :vocab_size].masked_fill_(allowed == 0, -torch.inf)


def forbid(
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor,
    positions_N: torch.Tensor,
    tokens_RL: torch.Tensor,
    num_prompt_R: torch.Tensor,
    stops: StopTokens,
    words: BadWords,
    *,
    vocab_size: int,
) -> None:
    """Stop tokens and bad words of each row. positions: how many tokens it has."""
    assert logits_NV.stride(1) == 1
    if len(logits_NV):
        _forbid_kernel[(len(logits_NV),)](
            logits_NV, rows_N, positions_N, tokens_RL, num_prompt_R, *stops, *words,
            logits_NV.stride(0), tokens_RL.stride(0), vocab_size, TILE=_TILE, num_warps=4,
        )  # fmt: skip


def forbid_reference(
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor,
    positions_N: torch.Tensor,
    tokens_RL: torch.Tensor,
    num_prompt_R: torch.Tensor,
    stops: StopTokens,
    words: BadWords,
    *,
    vocab_size: int,
) -> None:
    for n, (row, position) in enumerate(zip(rows_N.tolist(), positions_N.tolist(), strict=True)):
        if row < 0:
            continue
        impossible = []
        if position < stops.from_R[row]:
            first = int(stops.first_R[row])
            impossible += stops.ids[first : first + int(stops.number_R[row])].tolist()
        output = tokens_RL[row, int(num_prompt_R[row]) : position].tolist()
        first = int(words.first_R[row])
        for word in range(first, first + int(words.number_R[row])):
            start = int(words.tokens_first_R[row] + words.starts[word])
            *before, last = words.tokens[start : start + int(words.lengths[word])].tolist()
            if len(before) <= len(output) and output[len(output) - len(before) :] == before:
                impossible.append(last)
        logits_NV[n, [token for token in impossible if token < vocab_size]] = -torch.inf
