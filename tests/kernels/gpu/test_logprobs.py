"""Log-probabilities against their reference."""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.logprobs import Logprobs, token_logprobs, token_logprobs_reference


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """With padding that would be the likeliest if it were read."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab + 3, generator=generator) * 3
    logits[:, vocab:] = 1e4
    return logits.to(DEVICE, dtype)


def check(
    logits: torch.Tensor, places: list[int], chosen: list[int], num_top: int, vocab: int
) -> Logprobs:
    arguments = (logits, ints(*places), ints(*chosen), num_top)
    found = token_logprobs(*arguments, vocab_size=vocab)
    expected = token_logprobs_reference(*arguments, vocab_size=vocab)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.rank, expected.rank)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [0, 5, 20])
def test_same_as_the_reference(dtype: torch.dtype, num_top: int) -> None:
    vocab = 2100  # a second chunk
    logits = random_logits(3, vocab, dtype)
    check(logits, [2, 0], [7, int(logits[0, :vocab].float().argmax())], num_top, vocab)


def test_a_small_vocabulary_has_no_more() -> None:
    found = check(random_logits(1, 8, torch.float32), [0], [3], 20, 8)
    assert sorted(found.ids[0, 1:9].tolist()) == [*range(8)]
    assert found.ids[0, 9:].tolist() == [-1] * 12
    assert (found.logprobs[0, 9:] == -torch.inf).all()


def test_of_equals_the_lowest_ids() -> None:
    logits = torch.zeros(1, 3000, device=DEVICE)
    logits[:, 2500] = 1.0
    found = check(logits, [0], [2999], 4, 3000)
    assert found.ids[0].tolist() == [2999, 2500, 0, 1, 2]
    assert found.rank.tolist() == [2]


def test_masked_and_poisoned_rows() -> None:
    logits = random_logits(3, 100, torch.float32)
    logits[0, 5:] = -torch.inf
    logits[1] = torch.nan
    logits[2] = -torch.inf
    found = token_logprobs(logits, ints(0, 1, 2), ints(50, 1, 1), 8, vocab_size=100)
    assert found.logprobs[0, 0] == -torch.inf
    assert float(found.logprobs[0, 1:6].exp().sum()) == pytest.approx(1.0)
    assert not found.logprobs.isnan().any()
    assert found.rank.tolist() == [6, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 70])
def test_a_real_vocabulary(rows: int) -> None:
    vocab = 151_936
    logits = random_logits(rows, vocab, torch.bfloat16)
    check(logits, [*range(rows)], [row * 1000 for row in range(rows)], 20, vocab)
