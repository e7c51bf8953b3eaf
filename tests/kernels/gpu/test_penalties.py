"""Penalties against their reference."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE

from ringcast.kernels.gpu.penalties import penalise, penalise_reference, penalty_counts


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def check(
    vocab: int,
    rows: list[int],
    positions: list[int],
    num_prompt: list[int],
    penalties: list[tuple[float, float, float]],
    room: int = 32,
    length: int = 1500,
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    tokens = torch.randint(0, vocab + 3, (len(num_prompt), length), generator=generator)
    tokens = tokens.int().to(DEVICE)
    logits = torch.randn(len(rows), vocab + 4, generator=generator).to(DEVICE)
    counts = penalty_counts(room, vocab, DEVICE)
    table = torch.tensor(penalties, device=DEVICE)
    arguments = (ints(*rows), ints(*positions), tokens, ints(*num_prompt), table, counts)
    found, expected = logits.clone(), logits.clone()
    penalise(found, *arguments, vocab_size=vocab)
    penalise_reference(expected, *arguments, vocab_size=vocab)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[:, vocab:], logits[:, vocab:])
    assert not counts.any()


KINDS = [(1.0, 0.0, 0.0), (1.8, 0.0, 0.0), (0.6, 0.3, 0.0), (1.0, 0.0, -1.3), (1.3, -0.4, 0.7)]


@pytest.mark.parametrize("vocab", [7, 1000])
def test_same_logits_as_the_reference(vocab: int) -> None:
    check(vocab, [4, 3, -1, 2, 1, 0], [1300, 40, 9, 30, 0, 50], [3, 40, 0, 25, 9], KINDS)


def test_rows_take_turns_at_the_counts() -> None:
    check(30, [4, 3, 2, 1, 0], [40, 41, 42, 43, 44], [5] * 5, KINDS, room=2, length=50)


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.full((1, 4), -torch.inf, device=DEVICE)
    tokens = ints(0, 1, 1)[None]
    table = torch.tensor([[1.5, 1.0, 1.0]], device=DEVICE)
    counts = penalty_counts(1, 4, DEVICE)
    penalise(logits, ints(0), ints(3), tokens, ints(1), table, counts, vocab_size=4)
    assert (logits == -torch.inf).all()


@pytest.mark.gpu
def test_many_long_rows() -> None:
    check(151_936, [*range(80)], [20_000] * 80, [10_000] * 80, KINDS * 16, length=20_000)
