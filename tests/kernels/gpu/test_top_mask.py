"""Which tokens min_p, top_k and top_p leave over, against sorting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.sampling import Draw, Kept
from ringcast.kernels.gpu.top_mask import (
    Cuts,
    cut_scratch,
    find_cuts,
    find_cuts_reference,
)

# top_k, top_p, min_p, temperature
Option = tuple[int, float, float, float]
OPTIONS: list[Option] = [
    (5, 1.0, 0.0, 0.7),
    (0, 0.9, 0.0, 1.0),
    (0, 1.0, 0.05, 2.0),
    (50, 0.9, 0.02, 1.0),
    (1, 0.5, 0.0, 1.0),
    (0, 1e-9, 0.0, 1.0),
    (0, 0.999, 0.0, 1.5),
    (200, 0.5, 0.0, 20.0),
    (0, 1.0, 0.0, 1.0),
    (5, 0.5, 0.1, 0.0),
    (2**31 - 1, 1.0, 0.0, 1.0),
]


def cut(
    find: Any, logits: torch.Tensor, options: list[Option], vocab: int, capacity: int = 8192
) -> Kept:
    """Row i of the logits by option i."""
    columns = list(zip(*options, strict=True))
    dtypes = (torch.int32, torch.float64, torch.float32, torch.float32)
    *cuts, temperature = (
        torch.tensor(column, dtype=dtype, device=DEVICE)
        for column, dtype in zip(columns, dtypes, strict=True)
    )
    draw = Draw(temperature, torch.zeros(len(options), 3, dtype=torch.int32, device=DEVICE))
    rows = torch.arange(len(options), dtype=torch.int32, device=DEVICE)
    scratch = cut_scratch(len(options), vocab, DEVICE, capacity)
    for tensor in (*scratch.kept, *scratch[1:-1]):
        tensor.fill_(-9 if tensor.dtype == torch.int32 else torch.nan)
    kept = find(logits, rows, draw, Cuts(*cuts), scratch, vocab_size=vocab)
    assert not scratch.arrived.any()
    return kept


def survivors(logits: torch.Tensor, options: list[Option], kept: Kept) -> torch.Tensor:
    """[N, V]. Two exponentials of one number may differ in the last bit, so equal is nearly so."""
    temperature = torch.tensor([each[3] for each in options], device=DEVICE)
    x = logits.float()
    weights = ((x - x.amax(-1, keepdim=True)) / temperature[:, None]).exp()
    floor = kept.floor_S[:, None]
    equal = (weights - floor).abs() <= 1e-6 * floor
    first = torch.arange(x.shape[1], device=DEVICE) <= kept.last_S[:, None]
    return ((weights > floor) & ~equal) | (equal & first) | (floor <= 0)


def check(logits: torch.Tensor, options: list[Option], capacity: int = 8192) -> torch.Tensor:
    vocab = logits.shape[1]
    padded = torch.nn.functional.pad(logits, (0, 5), value=1e4)
    found = survivors(logits, options, cut(find_cuts, padded, options, vocab, capacity))
    expected = survivors(logits, options, cut(find_cuts_reference, logits, options, vocab))
    assert found.sum(-1).tolist() == expected.sum(-1).tolist()
    assert torch.equal(found, expected)
    return found


def random_logits(rows: int, vocab: int, step: float = 0.0) -> torch.Tensor:
    """step: between neighbouring values, so that ties are common."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    return (logits if not step else (logits / step).round() * step).to(DEVICE)


@pytest.mark.parametrize("step", [0.0, 0.5])
def test_same_survivors_as_by_sorting(step: float) -> None:
    # The second time in two chunks.
    options = OPTIONS if not step else OPTIONS[1:8:2]
    kept = check(random_logits(len(options), 2500 if step else 300, step), options)
    assert step or kept[4].sum() == 1
    assert step or kept[8:].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(dtype: torch.dtype) -> None:
    options = OPTIONS[1:4:2]
    check(random_logits(len(options), 300).to(dtype), options)


def test_more_in_the_hull_than_there_is_room_for() -> None:
    options = [OPTIONS[1], OPTIONS[3], OPTIONS[7]]
    check(random_logits(len(options), 500, 0.5), options, capacity=4)


def test_equals() -> None:
    logits = torch.tensor([0.5, 1.0, 0.5, 0.25, 0.5], device=DEVICE).log()
    options: list[Option] = [
        (2, 1.0, 0.0, 1.0),
        (0, 0.6, 0.0, 1.0),
        (2, 0.59, 0.0, 1.0),
        (0, 1.0, 1.0, 1.0),
        (0, 1e-300, 0.0, 1.0),
    ]
    kept = check(logits.repeat(len(options), 1), options)
    sets = [row.nonzero().flatten().tolist() for row in kept]
    assert sets == [[0, 1, 2, 4], [0, 1, 2], [0, 1], [1], [1]]


@pytest.mark.parametrize("capacity", [4, 8192])
def test_all_equal(capacity: int) -> None:
    options: list[Option] = [(0, 0.5, 0.0, 1.0), (0, 0.6, 0.0, 1.0), (3, 0.1, 0.0, 1.0)]
    kept = check(torch.zeros(3, 10, device=DEVICE), options, capacity)
    assert kept.sum(-1).tolist() == [5, 6, 1]


def test_poisoned_rows_end() -> None:
    options = [(3, 0.9, 0.0, 1.0)] * 4
    logits = random_logits(4, 100)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    logits[3, :50] = -torch.inf
    kept = cut(find_cuts, logits, options, 100)
    assert kept.floor_S.isfinite().all()
    assert kept.floor_S[2] == 1.0


def test_padding_rows_are_not_written() -> None:
    scratch = cut_scratch(2, 10, DEVICE)
    scratch.kept.floor_S.fill_(-7.0)
    ones = torch.ones(1, device=DEVICE)
    draw = Draw(ones, torch.zeros(1, 3, dtype=torch.int32, device=DEVICE))
    cuts = Cuts(ones.int(), ones.double(), ones * 0)
    rows = torch.tensor([-1, 0], dtype=torch.int32, device=DEVICE)
    find_cuts(torch.zeros(2, 10, device=DEVICE), rows, draw, cuts, scratch, vocab_size=10)
    assert scratch.kept.floor_S.tolist() == [-7.0, 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_real_vocabulary(dtype: torch.dtype, scale: float) -> None:
    vocab, options = 151_936, OPTIONS[:8] * 4
    logits = (random_logits(len(options), vocab) * scale / 3).to(dtype)
    found = survivors(logits, options, cut(find_cuts, logits, options, vocab))
    expected = survivors(logits, options, cut(find_cuts_reference, logits, options, vocab))
    # float32 sums of so many weights may put a token or two on either side of the share.
    different = (found != expected).sum(-1).cpu().numpy()
    assert (different <= 1 + 1e-4 * expected.sum(-1).cpu().numpy()).all(), different


@pytest.mark.gpu
def test_the_same_whatever_else_runs() -> None:
    vocab, options = 50_000, OPTIONS[:8] * 8
    logits = random_logits(len(options), vocab)
    first = cut(find_cuts, logits, options, vocab)
    for _ in range(5):
        again = cut(find_cuts, logits, options, vocab)
        assert torch.equal(first.floor_S, again.floor_S)
        assert torch.equal(first.last_S[again.floor_S > 0], again.last_S[again.floor_S > 0])
