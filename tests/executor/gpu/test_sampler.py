"""The sampler of the CUDA backend against the one for processors, wherever no chance is in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from chi_squared import check_counts
from interpreted_triton import ON_GPU
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.executor.gpu.sampler import Sampler
from ringcast.executor.gpu.sampler_logprobs import token_logprobs_of
from ringcast.executor.logits_processor import LogitsProcessor
from ringcast.executor.logprobs import token_logprobs
from ringcast.executor.sampler import Sampler as CpuSampler
from ringcast.executor.sampler import truncate
from ringcast.mq import codec
from ringcast.mq.messages import NewSequence, TokenLogprobs
from ringcast.mq.sampling_params import SamplingParams

VOCAB = 70
EOS = 2
LENGTH = 64
PROMPT = [1, 9, 21, 22, 9, VOCAB + 1]
OUTPUT = [5, 6, 7, 5, 6, 9]
WORDS = ((4,), (6, 9, 11), (9, 12), (5, 6, 9, 13), (3, 9, 14), (21, 5, 6, 7, 5, 6, 9, 15))


@dataclasses.dataclass
class Case:
    """A sequence in the batch: its tokens so far and what it asks for."""

    options: dict[str, Any]
    bad_words: tuple[tuple[int, ...], ...] = ()
    output: list[int] = dataclasses.field(default_factory=OUTPUT.copy)

    def sequence(self, row: int) -> NewSequence:
        params = SamplingParams(**{"seed": row, "max_tokens": None, **self.options})
        words = [codec.pack(word) for word in self.bad_words]
        tokens = codec.pack(PROMPT + self.output)
        return NewSequence(row, "", 0, tokens, len(PROMPT), 0, b"", params, words)


OPTIONS: dict[str, Case] = {
    "nothing": Case({}),
    "presence": Case({"presence_penalty": 1.3}),
    "frequency": Case({"frequency_penalty": -0.7}),
    "repetition": Case({"repetition_penalty": 1.8}),
    "logit_bias": Case({"logit_bias": {0: -100, 9: 2.5, 39: -3.5, VOCAB: 4.0}}),
    "allowed": Case({"allowed_token_ids": [9, 1, 5, 30, 5, 64, VOCAB + 5]}),
    "nothing allowed": Case({"allowed_token_ids": [VOCAB + 5]}),
    "bad_words": Case({}, WORDS),
    "min_tokens": Case({"min_tokens": 7, "stop_token_ids": [8, 9, VOCAB]}),
    "min_tokens reached": Case({"min_tokens": 6, "stop_token_ids": [8, 9]}),
    "no output": Case({"frequency_penalty": 1.0, "repetition_penalty": 1.5}, WORDS, []),
    "all": Case(
        {
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.4,
            "logit_bias": {5: 3.0, 12: 4.0, 2: 9.0, 20: -1.5},
            "allowed_token_ids": [*range(0, 15), 20, 66],
            "min_tokens": 9,
            "stop_token_ids": [8],
        },
        WORDS,
    ),
}


def cases(**more: Any) -> list[Case]:
    return [
        Case({**case.options, **more}, case.bad_words, case.output.copy())
        for case in OPTIONS.values()
    ]


class Pair:
    """Both samplers with the same sequences, and the tokens that they know."""

    def __init__(self, cases: list[Case], processors: list[LogitsProcessor] = []) -> None:  # noqa: B006
        self.cases = cases
        self.known = np.full((len(cases), LENGTH), 7, np.int32)
        self.tokens = torch.full(self.known.shape, 7, dtype=torch.int32, device=DEVICE)
        self.cpu = CpuSampler(len(cases), VOCAB, [EOS], self.known, processors)
        self.sampler = Sampler(len(cases), VOCAB, [EOS], self.tokens, DEVICE, processors)
        for row, case in enumerate(cases):
            self.enter(row, case)

    def enter(self, row: int, case: Case) -> None:
        self.cases[row] = case
        tokens = PROMPT + case.output
        self.known[row, : len(tokens)] = tokens
        self.tokens[row, : len(tokens)] = torch.tensor(tokens).int().to(DEVICE)
        self.cpu.enter(case.sequence(row))
        self.sampler.enter(case.sequence(row))

    def positions(self, rows: Any) -> Any:
        return np.array([len(PROMPT) + len(self.cases[r].output) for r in rows], np.int32)

    def sample(
        self, logits: torch.Tensor, rows: Any
    ) -> tuple[list[int], TokenLogprobs | None, list[int], TokenLogprobs | None]:
        """Tokens and log-probabilities of the sampler under test, and then the other's."""
        rows = np.asarray(rows, np.int32)
        positions = self.positions(rows)
        expected, expected_logprobs = self.cpu.sample(logits.cpu().clone(), rows, positions)
        tokens, pending = sample(self.sampler, logits, rows, positions)
        logprobs = None if pending is None else pending.read()
        return tokens.tolist(), logprobs, expected.tolist(), expected_logprobs

    def append(self, rows: Any, tokens: list[int]) -> None:
        """On the device too: what has been sampled is known there first."""
        positions = self.positions(rows)
        self.known[rows, positions] = tokens
        for row, position, token in zip(rows, positions, tokens, strict=True):
            self.tokens[row, position] = token
            self.cases[row].output.append(token)


def sample(sampler: Sampler, logits: torch.Tensor, rows: Any, positions: Any) -> Any:
    """As the runner calls it, with logits that are padded."""
    padded = torch.nn.functional.pad(logits.to(DEVICE), (0, 26), value=1e4)
    on_device = [torch.from_numpy(np.array(a, np.int32)).to(DEVICE) for a in (rows, positions)]
    out = torch.full((len(rows),), -7, dtype=torch.int32, device=DEVICE)
    sampler.upload()
    pending = sampler.sample(padded, rows, positions, *on_device, out)
    return out.cpu(), pending


def random_logits(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator) * 2).to(dtype)


def check_logprobs(found: TokenLogprobs | None, expected: TokenLogprobs | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.width == expected.width
    assert found.index == expected.index
    assert found.token_ids == expected.token_ids
    assert found.rank == expected.rank
    assert codec.floats(found.logprobs) == pytest.approx(codec.floats(expected.logprobs), abs=1e-5)


# --- edited logits --------------------------------------------------------------------------------


def test_edited_logits_are_the_processors() -> None:
    pair = Pair(cases())
    rows = np.arange(len(pair.cases), dtype=np.int32)
    positions = pair.positions(rows)
    logits = random_logits(len(rows))
    expected = logits.clone()
    pair.cpu._masks.apply(expected, rows, positions)
    pair.cpu._edit(expected, rows, positions)
    found = logits.clone().to(DEVICE)
    arrays = [torch.from_numpy(array).to(DEVICE) for array in (rows, positions)]
    pair.sampler.upload()
    pair.sampler._lists.mask(found, rows, *arrays)
    pair.sampler._edit(found, rows, positions, *arrays)
    torch.testing.assert_close(found.cpu(), expected)
    assert (found.cpu() != logits).any(-1).tolist() == [
        name not in ("nothing", "nothing allowed", "min_tokens reached") for name in OPTIONS
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_greedy_steps_of_a_mixed_batch(dtype: torch.dtype) -> None:
    pair = Pair(cases(temperature=0))
    rng = np.random.default_rng(0)
    for step in range(12 if ON_GPU else 4):
        rows = rng.permutation(len(pair.cases))[: rng.integers(3, len(pair.cases))]
        tokens, _, expected, _ = pair.sample(random_logits(len(rows), step, dtype).float(), rows)
        assert tokens == expected
        pair.append(rows, tokens)
        if step == 1:  # another sequence, with other lists, takes a row
            pair.enter(3, Case({"temperature": 0, "min_tokens": 30}, ((5,), (9, 9))))
            pair.enter(7, Case({"temperature": 0}))


def test_what_is_asked_of_16_bit_logits_is_done_in_float32() -> None:
    pair = Pair([Case({"temperature": 0, "presence_penalty": 0.01}, output=[0]), Case({})])
    logits = torch.full((2, VOCAB), 100.0, dtype=torch.float16)
    rows = np.arange(2, dtype=np.int32)
    assert sample(pair.sampler, logits, rows, pair.positions(rows))[0][0] == 1


# --- logits processors ----------------------------------------------------------------------------


class NotTheLast(LogitsProcessor):
    """Makes a row's last token impossible, and notes what it was given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def enter(self, sequence: NewSequence) -> bool:
        return bool((sequence.params.extra_args or {}).get("not_the_last"))

    def apply(self, logits: torch.Tensor, rows: Any, known_tokens: Any, num_known: Any) -> None:
        assert (logits.dtype, logits.shape) == (torch.float32, (len(rows), VOCAB))
        pairs = zip(rows, num_known, strict=True)
        self.seen.append([(int(row), known_tokens[row, :n].tolist()) for row, n in pairs])
        for i, row in enumerate(rows):
            logits[i, known_tokens[row, num_known[i] - 1]] = -torch.inf


def test_processors_see_the_tokens_of_the_step_before() -> None:
    processor = NotTheLast()
    wanting = {"temperature": 0, "extra_args": {"not_the_last": True}}
    pair = Pair([Case({"temperature": 0}), Case(wanting), Case(wanting)], [processor])
    logits = torch.zeros(3, VOCAB)
    logits[:, [9, 30]] = torch.tensor([3.0, 2.0])
    for rows, step in (([2, 0, 1], 0), ([1, 2], 1)):
        tokens, _, expected, _ = pair.sample(logits[: len(rows)], rows)
        assert tokens == expected == ([30, 9, 30] if step == 0 else [9, 9])
        assert processor.seen[-1] == processor.seen[-2]
        pair.append(np.array(rows), tokens)


# --- what survives --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "edits"),
    [
        ({"top_k": 7}, {}),
        ({"top_p": 0.6, "temperature": 1.5}, {"presence_penalty": 0.5}),
        ({"min_p": 0.1}, {"min_tokens": 9}),
        ({"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 0.8}, {}),
    ],
    ids=str,
)
def test_only_survivors_are_drawn_and_all_of_them(options: Any, edits: Any) -> None:
    draws = 4000 if ON_GPU else 3
    # One sequence in many rows, each with its own seed.
    many = Pair([Case({**options, **edits, "seed": seed}) for seed in range(draws)])
    rows, logits = np.arange(draws, dtype=np.int32), random_logits(1)
    positions = many.positions(rows)
    tokens, _ = sample(many.sampler, logits.repeat(draws, 1), rows, positions)

    edited = logits.clone()
    many.cpu._masks.apply(edited, rows[:1], positions[:1])
    many.cpu._edit(edited, rows[:1], positions[:1])
    scaled = (edited[0] - edited[0].max()) / options.get("temperature", 1.0)
    weights, ids = scaled.exp().numpy(), np.empty(VOCAB, np.int32)
    cuts = [options.get(*pair) for pair in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]
    survivors = np.sort(ids[: truncate(weights.copy(), ids, *cuts)])

    assert many.sampler._cut_scratch is not None
    kept = many.sampler._cut_scratch.kept
    floor, last = float(kept.floor_S[0]) * (1 - 1e-6), int(kept.last_S[0])
    assert np.flatnonzero((weights >= floor) & (np.arange(VOCAB) <= last)).tolist() == [*survivors]
    assert set(tokens.tolist()) <= set(survivors.tolist())
    if ON_GPU:
        expected = np.zeros(VOCAB)
        expected[survivors] = draws * weights[survivors] / weights[survivors].sum()
        check_counts(np.bincount(tokens.numpy(), minlength=VOCAB), expected)


# --- batches --------------------------------------------------------------------------------------


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3, "top_k": 3},
    {"seed": 1},
    {"seed": -1, "temperature": 0.7},
    {"seed": -(2**63), "top_k": 5},
    {"seed": 2**63 - 1, "top_p": 0.9, "repetition_penalty": 1.2},
    {"seed": 4, "min_p": 0.1, "logprobs": 0},
    {"seed": 5, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "min_tokens": 9, "logprobs": 5},
]


def test_a_row_samples_alone_as_in_any_batch() -> None:
    pair = Pair([Case(options) for options in MIXED])
    logits = random_logits(8)
    rows = np.arange(8, dtype=np.int32)
    positions = pair.positions(rows)
    together = sample(pair.sampler, logits, rows, positions)[0].tolist()
    order = np.random.default_rng(0).permutation(8).astype(np.int32)
    shuffled, _ = sample(pair.sampler, logits[torch.from_numpy(order).long()], order, positions)
    assert shuffled.tolist() == [together[row] for row in order]
    for row in (1, 3, 7):
        one = rows[row : row + 1]
        alone, _ = sample(pair.sampler, logits[row : row + 1], one, positions[:1])
        assert alone.tolist() == [together[row]]


def test_plain_rows_get_the_same_tokens_both_ways() -> None:
    pair = Pair([Case(options) for options in MIXED])
    sampler = pair.sampler
    which = [sampler.is_plain(np.array([row])) for row in range(8)]
    assert which == [True, False, True, True, False, False, False, False]
    assert sampler.is_plain(np.array([0, 3, 2]))
    assert not sampler.is_plain(np.array([0, 4]))
    rows, logits = np.array([0, 2, 3], np.int32), random_logits(3)
    tokens, _ = sample(sampler, logits, rows, pair.positions(rows))
    out = torch.full((4,), -7, dtype=torch.int32, device=DEVICE)
    padded = [
        torch.from_numpy(np.append(a, end).astype(np.int32)).to(DEVICE)
        for a, end in ((rows, -1), (pair.positions(rows), 0))
    ]
    sampler.sample_plain(torch.cat([logits, logits[:1]]).to(DEVICE), *padded, out)
    assert out.tolist() == [*tokens.tolist(), -7]


def test_an_empty_step() -> None:
    pair = Pair([Case({})])
    none = np.empty(0, np.int32)
    tokens, pending = sample(pair.sampler, torch.empty(0, VOCAB), none, none)
    assert tokens.tolist() == []
    assert pending is None


def test_warming_up_leaves_no_trace() -> None:
    pair = Pair([Case({"temperature": 0})] * 2)
    fresh = Sampler(2, VOCAB, [EOS], pair.tokens, DEVICE)
    fresh.warm_up(random_logits(2).to(DEVICE))
    assert fresh.is_plain(np.array([0, 1]))
    rows, logits = np.arange(2, dtype=np.int32), random_logits(2)
    tokens, pending = sample(fresh, logits, rows, rows)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert pending is None


# --- logprobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_of_the_raw_distribution(dtype: torch.dtype) -> None:
    pair = Pair(
        [
            Case({"temperature": 0, "logprobs": 2, "min_tokens": 9}),
            Case({"temperature": 0}),
            Case({"temperature": 0, "logprobs": 0, "presence_penalty": 2.0}),
            Case({"temperature": 0, "logprobs": 4}),
        ]
    )
    logits = random_logits(4).to(dtype).float()
    logits[0, EOS] = 90.0  # masked by min_tokens, and still the likeliest of the raw distribution
    tokens, found, expected_tokens, expected = pair.sample(logits, [0, 1, 2, 3])
    assert tokens == expected_tokens
    check_logprobs(found, expected)
    assert found is not None
    assert codec.ints(found.rank)[0] == 2


def test_no_logprobs_when_no_row_of_the_step_asked() -> None:
    pair = Pair([Case({"temperature": 0}), Case({"temperature": 0, "logprobs": 1})])
    assert pair.sample(random_logits(1), [0])[1] is None
    assert pair.sample(random_logits(1), [1])[1] is not None


def test_logprobs_of_given_tokens() -> None:
    logits = random_logits(5)
    tokens = np.array([3, 1, 4, 1, 69], np.int32)
    pending = token_logprobs_of(logits.to(DEVICE), torch.from_numpy(tokens).to(DEVICE), 3, VOCAB)
    raw = logits.log_softmax(-1)
    check_logprobs(
        pending.read(), token_logprobs(raw, np.arange(5), tokens, np.full(5, 3, np.int32))
    )
