"""The drawing kernel against its reference, and its generator against published words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chi_squared import check_counts
from interpreted_triton import ON_GPU
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.sampling import (
    UNIT,
    Draw,
    Kept,
    draw_scratch,
    sample_plain,
    sample_plain_reference,
)
from ringcast.kernels.gpu.sampling_draws import philox_reference, uniform_reference


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_logits(rows: int, vocab: int, dtype: torch.dtype, padding: int = 0) -> torch.Tensor:
    """With padding that would win if it were read."""
    generator = torch.Generator().manual_seed(rows + vocab)
    logits = torch.randn(rows, vocab + padding, generator=generator) * 3
    logits[:, vocab:] = 1e4
    return logits.to(DEVICE, dtype)


def make_draw(temperatures: list[float], seed: int = 0) -> Draw:
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**31), 2**31, (len(temperatures), 3), generator=generator)
    return Draw(torch.tensor(temperatures, device=DEVICE), seeds.int().to(DEVICE))


def both(
    logits: torch.Tensor, rows: Any, positions: Any, draw: Draw, **options: Any
) -> list[list[int]]:
    """What the kernel and the reference write over -7."""
    scratch = draw_scratch(len(logits), logits.shape[1], DEVICE)
    answers = []
    for sample in (sample_plain, sample_plain_reference):
        out = torch.full((len(logits),), -7, dtype=torch.int32, device=DEVICE)
        sample(logits, ints(*rows), ints(*positions), draw, out, scratch, **options)
        answers.append(out.tolist())
    assert not scratch.arrived.any()
    return answers


# --- draws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's known answers
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(counter: Any, key: Any, words: Any) -> None:
    made = philox_reference(
        tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key)
    )
    assert tuple(int(word) for word in made) == words


def test_draws_are_the_cpus() -> None:
    """The same numbers for the same names, on every device."""
    from ringcast.executor import philox

    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**31), 2**31, (50, 3), generator=generator).int()
    positions = torch.arange(0, 5000, 100, dtype=torch.int32)
    low, high, choice = (
        part.numpy().view(np.uint32).astype(np.uint64) for part in seeds.T.contiguous()
    )
    expected = philox.uniforms(
        low | high << np.uint64(32), choice, positions.numpy().astype(np.uint64), philox.SAMPLE, 0
    )
    assert uniform_reference(positions, seeds).tolist() == expected.tolist()


# --- against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_tokens_as_the_reference(dtype: torch.dtype) -> None:
    vocab = UNIT + 77  # a second chunk
    logits = random_logits(5, vocab, dtype, padding=19)
    draw = make_draw([0.0, 0.7, 1.0, 40.0])
    kernel, reference = both(
        logits, [3, 1, -1, 0, 2], [9, 2**31 - 1, 3, 4, 5], draw, vocab_size=vocab
    )
    assert kernel == reference
    assert kernel[2] == -7
    assert kernel[3] == int(logits[3, :vocab].float().argmax())


def test_many_rows_take_several_units_a_program() -> None:
    vocab, rows = UNIT + 30, 17
    logits = random_logits(rows, vocab, torch.float32)
    logits[:, UNIT:] += 12
    which = range(rows) if ON_GPU else [*range(3), *[-1] * (rows - 3)]
    kernel, reference = both(logits, which, range(rows), make_draw([1.0] * rows), vocab_size=vocab)
    assert kernel == reference
    assert max(kernel) >= UNIT


def test_greedy_takes_the_lowest_id_of_the_likeliest() -> None:
    vocab = UNIT + 9
    logits = random_logits(3, vocab, torch.float32)
    logits[0, [vocab - 1, 1500, 700, 589]] = 50.0
    logits[1, [vocab - 1, 1]] = 50.0
    logits[2] = -1.0
    logits[2, [5, 600]] = torch.tensor([-0.0, 0.0], device=DEVICE)
    tokens, _ = both(logits, [0, 0, 0], [1, 1, 1], make_draw([0.0]), vocab_size=vocab)
    assert tokens == [589, 1, 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_poisoned_row_gets_a_token(temperature: float) -> None:
    logits = random_logits(5, 300, torch.float32)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2] = torch.inf
    logits[3, :200] = torch.nan
    logits[4, 7] = torch.inf
    tokens, reference = both(logits, [0] * 5, [1] * 5, make_draw([temperature]), vocab_size=300)
    assert tokens == reference
    assert tokens[:2] == [0, 0]
    assert tokens[3] >= 200
    assert tokens[4] == 7


@pytest.mark.parametrize("temperature", [1e-5, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = random_logits(3, 300, torch.float32) * 10
    logits[:, 5:] = -torch.inf
    tokens, _ = both(logits, [0] * 3, [1, 2, 3], make_draw([temperature]), vocab_size=300)
    assert max(tokens) < 5
    if temperature < 1:
        assert tokens == logits.argmax(-1).tolist()


def test_only_what_is_kept_is_drawn() -> None:
    logits = torch.zeros(4, 300, device=DEVICE)
    logits[:, 100:103] = 4.0
    kept = Kept(
        torch.full((4,), 4.0, device=DEVICE),
        torch.tensor([0.5, 1.0, 0.0, 1.0], device=DEVICE),
        ints(2**31 - 1, 101, 0, 100),
    )
    draw = make_draw([1.0, 0.0])
    for position in range(3):
        kernel, reference = both(
            logits, [0, 0, 1, 0], [position] * 4, draw, vocab_size=300, kept=kept
        )
        assert kernel == reference
        assert kernel[0] in (100, 101, 102)
        assert kernel[1] in (100, 101)
        assert kernel[2:] == [100, 100]


def test_nothing_to_do() -> None:
    assert both(torch.zeros(0, 10, device=DEVICE), [], [], make_draw([1.0]), vocab_size=10) == [
        [],
        [],
    ]


# --- distributions --------------------------------------------------------------------------------

DRAWS = 40_000 if ON_GPU else 4_000


def draw_many(logits_V: torch.Tensor, temperature: float, draws: int, **more: Any) -> Any:
    """By the kernel; the interpreter would take minutes, so there by the reference."""
    sample = sample_plain if ON_GPU else sample_plain_reference
    logits = logits_V.to(DEVICE).expand(draws, -1)
    out = torch.empty(draws, dtype=torch.int32, device=DEVICE)
    rows, positions = torch.zeros_like(out), torch.arange(draws, device=DEVICE).int()
    scratch = draw_scratch(draws, len(logits_V), DEVICE)
    draw = make_draw([temperature], **more)
    sample(logits, rows, positions, draw, out, scratch, vocab_size=len(logits_V))
    return out.cpu().numpy()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = random_logits(1, 20, torch.float32)[0].cpu()
    counts = np.bincount(draw_many(logits, temperature, DRAWS), minlength=20)
    check_counts(counts, DRAWS * (logits.double() / temperature).softmax(-1).numpy())


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should() -> None:
    # Half of the weight lies on one token, the other half on thousands.
    vocab, draws = 2_200, DRAWS // 10
    logits = torch.zeros(vocab)
    logits[2_100] = float(np.log(vocab - 1))
    tokens = draw_many(logits, 1.0, draws)
    counts = np.bincount(np.where(tokens == 2_100, 20, tokens * 20 // vocab), minlength=21)
    expected = np.full(21, draws / 40)
    expected[20] = draws / 2
    check_counts(counts, expected)


def test_positions_and_seeds_draw_independently() -> None:
    logits, draws = torch.zeros(8), DRAWS
    tokens = draw_many(logits, 1.0, draws)
    others = draw_many(logits, 1.0, draws, seed=1)
    for first, second in ((tokens, others), (tokens[1:], tokens[:-1])):
        pairs = np.bincount(first * 8 + second, minlength=64)
        check_counts(pairs, np.full(64, len(first) / 64))


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_a_real_vocabulary(rows: int) -> None:
    vocab = 151_936
    logits = random_logits(rows, vocab, torch.bfloat16)
    temperatures = [0.0, 1.0, 0.6]
    which = [row % 3 for row in range(rows)]
    kernel, reference = both(logits, which, range(rows), make_draw(temperatures), vocab_size=vocab)
    assert sum(a != b for a, b in zip(kernel, reference, strict=True)) <= rows // 100


@pytest.mark.gpu
def test_logits_beyond_two_to_the_31() -> None:
    vocab, rows = 151_936, 14_400
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, 12_345] = 1.0
    out = torch.empty(rows, dtype=torch.int32, device=DEVICE)
    zeros = torch.zeros_like(out)
    scratch = draw_scratch(rows, vocab, DEVICE)
    sample_plain(logits, zeros, zeros, make_draw([0.0]), out, scratch, vocab_size=vocab)
    assert out[-1] == 12_345
    assert not out[:-1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_in_a_cuda_graph(pdl: bool) -> None:
    vocab = 32_000
    logits = random_logits(8, vocab, torch.bfloat16)
    draw, scratch = make_draw([0.0, 1.0]), draw_scratch(8, vocab, DEVICE)
    rows, positions = ints(*[0, 1] * 4), ints(*range(8))
    out, expected = torch.empty_like(rows), torch.empty_like(rows)
    sample_plain(logits, rows, positions, draw, out, scratch, vocab_size=vocab, pdl=pdl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_plain(logits, rows, positions, draw, out, scratch, vocab_size=vocab, pdl=pdl)
    for step in range(3):
        positions += step
        out.fill_(-1)
        graph.replay()
        sample_plain_reference(logits, rows, positions, draw, expected, vocab_size=vocab)
        assert out.tolist() == expected.tolist()
