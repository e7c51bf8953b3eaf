"""Masks and biases against their references."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.logit_masks import (
    BadWords,
    StopTokens,
    forbid,
    forbid_reference,
    mask_all_but_allowed,
    mask_all_but_allowed_reference,
)
from ringcast.kernels.gpu.sampling_bias import Biases, add_biases, add_biases_reference


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values).tolist(), dtype=torch.int32, device=DEVICE)


def random_logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return torch.randn(rows, vocab + 8, generator=generator).to(DEVICE, dtype)


def flat(lists: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each list begins, how long it is, and all of them end to end."""
    lengths = np.array([len(each) for each in lists])
    return (
        ints(np.cumsum(lengths) - lengths),
        ints(lengths),
        ints([*itertools.chain(*lists)] or [0]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [31, 4100])
def test_all_but_allowed(dtype: torch.dtype, vocab: int) -> None:
    words = -(-vocab // 32)
    generator = torch.Generator().manual_seed(0)
    allowed = torch.randint(-(2**31), 2**31, (3, words), generator=generator).int().to(DEVICE)
    logits = random_logits(4, vocab, dtype)
    found, expected = logits.clone(), logits.clone()
    arguments = (ints([2, 1, -1, 0]), ints([1, 0, 1]), allowed)
    mask_all_but_allowed(found, *arguments, vocab_size=vocab)
    mask_all_but_allowed_reference(expected, *arguments, vocab_size=vocab)
    assert torch.equal(found, expected)
    assert torch.equal(found[1:3], logits[1:3])
    assert (found[0] == -torch.inf).any()


WORDS = [[4], [6, 9, 11], [9, 12], [5, 6, 9, 13], [3, 9, 14], [21, 5, 6, 7, 5, 6, 9, 15], [9, 999]]


def bad_words(rows: list[list[list[int]]]) -> BadWords:
    lengths = [[len(word) for word in words] for words in rows]
    starts = [(np.cumsum(each, dtype=int) - each).tolist() if each else [] for each in lengths]
    first, number, all_lengths = flat(lengths)
    tokens_first, _, tokens = flat([[*itertools.chain(*words)] for words in rows])
    longest = ints([max(each, default=0) for each in lengths])
    return BadWords(first, number, longest, tokens_first, flat(starts)[2], all_lengths, tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stops_and_bad_words(dtype: torch.dtype) -> None:
    vocab = 40
    tokens = ints([[1, 9, 21, 22, 9, 5, 6, 7, 5, 6, 9, 0, 0]] * 5)
    num_prompt = ints([5, 5, 9, 5, 3])
    many = [[9, i % vocab] for i in range(300)]
    words = bad_words([WORDS, [], WORDS, many, [[3]]])
    stops = StopTokens(ints([12, 11, 12, 0, 99]), *flat([[2, 8], [2, 8], [2], [3], [*range(200)]]))
    logits = random_logits(6, vocab, dtype)
    found, expected = logits.clone(), logits.clone()
    rows, positions = ints([0, 1, 2, -1, 3, 4]), ints([11] * 6)
    arguments = (rows, positions, tokens, num_prompt, stops, words)
    forbid(found, *arguments, vocab_size=vocab)
    forbid_reference(expected, *arguments, vocab_size=vocab)
    assert torch.equal(found, expected)
    impossible = [row.isinf().nonzero().flatten().tolist() for row in found]
    assert impossible[0] == [2, 4, 8, 11, 12, 13]
    assert impossible[1] == []
    # The prompt ends with 5; only 6 and 9 are of the output.
    assert impossible[2] == [2, 4, 11, 12]
    assert impossible[3] == []
    assert impossible[4] == impossible[5] == [*range(vocab)]


def test_biases() -> None:
    logits = random_logits(4, 40, torch.float32)
    first, number, ids = flat([[0, 39], [], [*range(40)]])
    biases = torch.linspace(-100, 100, len(ids), device=DEVICE)
    found, expected = logits.clone(), logits.clone()
    lists = Biases(first, number, ids, biases)
    add_biases(found, ints([0, -1, 2, 1]), lists)
    add_biases_reference(expected, ints([0, -1, 2, 1]), lists)
    assert torch.equal(found, expected)
    assert torch.equal(found[[1, 3]], logits[[1, 3]])
    assert found[0, 0] == logits[0, 0] - 100
