"""Masks, biases and penalties against transformers' processors and against the formula, alone, all
together, and in batches whose rows want different things.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from chi_squared import check_counts
from transformers.generation import logits_process as hf

from ringcast.executor.logits_processor import LogitsProcessor
from ringcast.executor.sampler import Sampler
from ringcast.mq import codec
from ringcast.mq.messages import NewSequence
from ringcast.mq.sampling_params import SamplingParams

VOCAB = 40
EOS = 2
MAX_LENGTH = 64


@dataclasses.dataclass
class Case:
    """A sequence in the batch: its tokens so far and what it asks for."""

    prompt: list[int]
    output: list[int]
    options: dict[str, Any]
    bad_words: tuple[tuple[int, ...], ...] = ()

    def sequence(self, row: int, output: list[int] | None = None) -> NewSequence:
        params = SamplingParams(**{"seed": row, "max_tokens": None, **self.options})
        tokens = self.prompt + (self.output if output is None else output)
        words = [codec.pack(word) for word in self.bad_words]
        packed = codec.pack(tokens)
        return NewSequence(row, "", 0, packed, len(self.prompt), 0, b"", params, words)

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        """[V] by transformers, in our order. frequency and presence are OpenAI's formula."""
        params = self.sequence(0).params
        scores = logits[None].float().clone()
        tokens = torch.tensor([self.prompt + self.output])
        if params.allowed_token_ids is not None:
            allowed = list(params.allowed_token_ids)
            scores = hf.PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1)(tokens, scores)
        if self.bad_words:
            words = [list(word) for word in self.bad_words]
            process = hf.NoBadWordsLogitsProcessor(words, eos_token_id=[-1])
            # A bad word doesn't reach into the prompt. (-1 is no token.)
            scores = process(torch.tensor([[-1, *self.output]]), scores)
        if params.min_tokens:
            stops = [EOS, *params.stop_token_ids]
            process = hf.MinNewTokensLengthLogitsProcessor(
                len(self.prompt), params.min_tokens, stops
            )
            scores = process(tokens, scores)
        if params.logit_bias:
            bias = {(token,): float(value) for token, value in params.logit_bias.items()}
            scores = hf.SequenceBiasLogitsProcessor(bias)(tokens, scores)
        if params.repetition_penalty != 1:
            process = hf.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
            scores = process(tokens, scores)
        counts = torch.bincount(torch.tensor(self.output, dtype=torch.int64), minlength=VOCAB)
        scores = scores - params.frequency_penalty * counts
        return (scores - params.presence_penalty * (counts > 0))[0]


class Batch:
    """A sampler with these cases in its rows, and the batch's tokens as the runner keeps them."""

    def __init__(self, cases: list[Case], processors: list[LogitsProcessor] = []) -> None:  # noqa: B006
        self.cases = cases
        self.known_tokens = np.full((len(cases), MAX_LENGTH), 7, np.int32)
        self.sampler = Sampler(len(cases), VOCAB, [EOS], self.known_tokens, processors)
        for row, case in enumerate(cases):
            self.enter(case.sequence(row))

    def enter(self, sequence: NewSequence) -> None:
        tokens = codec.ints(sequence.token_ids)
        self.known_tokens[sequence.row, : len(tokens)] = tokens
        self.sampler.enter(sequence)

    def positions(self, rows: Any) -> Any:
        return np.array([len(self.cases[r].prompt) + len(self.cases[r].output) for r in rows])

    def edit(self, logits: torch.Tensor) -> torch.Tensor:
        """What the sampler makes of float32 logits before temperature."""
        rows = np.arange(len(self.cases), dtype=np.int32)
        logits, positions = logits.clone(), self.positions(rows)
        self.sampler._masks.apply(logits, rows, positions)
        self.sampler._edit(logits, rows, positions)
        return logits

    def sample(self, logits: torch.Tensor, rows: Any = None) -> list[int]:
        """A token for each row, which the rows remember."""
        rows = np.arange(len(self.cases), dtype=np.int32) if rows is None else rows
        positions = self.positions(rows).astype(np.int32)
        tokens, _ = self.sampler.sample(logits.clone(), rows, positions)
        self.known_tokens[rows, positions] = tokens
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self.cases[row].output.append(token)
        return tokens.tolist()


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


OUTPUT = [5, 6, 7, 5, 6, 9]
WORDS = ((4,), (6, 9, 11), (9, 12), (5, 6, 9, 13), (3, 9, 14), (21, 5, 6, 7, 5, 6, 9, 15))
OPTIONS: dict[str, tuple[dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "nothing": ({}, ()),
    "presence": ({"presence_penalty": 1.3}, ()),
    "presence, negative": ({"presence_penalty": -2}, ()),
    "frequency": ({"frequency_penalty": 0.7}, ()),
    "frequency, negative": ({"frequency_penalty": -0.4}, ()),
    "repetition": ({"repetition_penalty": 1.8}, ()),
    "repetition below 1": ({"repetition_penalty": 0.6}, ()),
    "logit_bias": ({"logit_bias": {0: -100, 9: 2.5, 39: -3.5}}, ()),
    "allowed_token_ids": ({"allowed_token_ids": [9, 1, 5, 30, 5]}, ()),
    "bad_words": ({}, WORDS),
    "min_tokens": ({"min_tokens": 7, "stop_token_ids": [8, 9]}, ()),
    "min_tokens reached": ({"min_tokens": 6, "stop_token_ids": [8, 9]}, ()),
    "all": (
        {
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.4,
            "logit_bias": {5: 3.0, 12: 4.0, 2: 9.0, 20: -1.5},
            "allowed_token_ids": [*range(0, 15), 20],
            "min_tokens": 9,
            "stop_token_ids": [8],
        },
        WORDS,
    ),
}


def cases(**more: Any) -> list[Case]:
    return [
        Case([1, 9, 21, 22, 9], OUTPUT.copy(), {**options, **more}, words)
        for options, words in OPTIONS.values()
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_alone(name: str) -> None:
    (case,) = itertools.islice(cases(), [*OPTIONS].index(name), [*OPTIONS].index(name) + 1)
    logits = random_logits(1)
    edited = Batch([case]).edit(logits)
    torch.testing.assert_close(edited[0], case.expected(logits[0]))
    assert torch.equal(edited, logits) == (name in ("nothing", "min_tokens reached"))


def test_rows_that_want_different_things() -> None:
    batch = Batch(cases() * 3)
    logits = random_logits(len(batch.cases))
    edited = batch.edit(logits)
    for row, case in enumerate(batch.cases):
        torch.testing.assert_close(edited[row], case.expected(logits[row]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_steps_of_a_mixed_batch(dtype: torch.dtype) -> None:
    batch = Batch(cases(temperature=0))
    rng = np.random.default_rng(0)
    for step in range(25):
        rows = rng.permutation(len(batch.cases))[: rng.integers(1, len(batch.cases))]
        logits = random_logits(len(rows), step).to(dtype)
        expected = [batch.cases[row].expected(logits[i]) for i, row in enumerate(rows)]
        tokens = batch.sample(logits, rows.astype(np.int32))
        assert tokens == [scores.argmax().item() for scores in expected]


def test_a_preempted_row_comes_back_as_it_was() -> None:
    batch = Batch(cases())
    for step in range(10):
        batch.sample(random_logits(len(batch.cases), step))
    logits = random_logits(len(batch.cases), 99)
    before = batch.edit(logits)
    order = list(reversed(range(len(batch.cases))))
    again = Batch([batch.cases[row] for row in order])
    torch.testing.assert_close(again.edit(logits[order])[order], before, rtol=0, atol=0)
    # And in the same sampler, where another sequence had the row in between.
    for row in order:
        batch.enter(Case([3], [9] * 20, {"repetition_penalty": 3.0}, ((9,),)).sequence(row))
        batch.enter(batch.cases[row].sequence(row))
    torch.testing.assert_close(batch.edit(logits), before, rtol=0, atol=0)


def test_a_row_forgets_the_sequence_before() -> None:
    batch = Batch(cases(temperature=0))
    batch.cases = [Case([5, 6, 9], [], {"temperature": 0}) for _ in batch.cases]
    for row, case in enumerate(batch.cases):
        batch.enter(case.sequence(row))
    logits = random_logits(len(batch.cases))
    assert torch.equal(batch.edit(logits), logits)
    assert batch.sample(logits) == logits.argmax(-1).tolist()


def test_what_is_asked_of_bf16_logits_is_done_in_float32() -> None:
    # Between 64 and 128 bf16 has steps of a half.
    logits = torch.full((2, VOCAB), 100.0, dtype=torch.bfloat16)
    batch = Batch(
        [Case([1], [0], {"temperature": 0, "presence_penalty": 0.01}), Case([1], [0], {})]
    )
    assert batch.sample(logits)[0] == 1


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    case = Case([5, 6], [], {}, ((6, 9), (5, 6, 9), (10,)))
    batch = Batch([case])
    assert batch.edit(torch.zeros(1, VOCAB))[0].isinf().nonzero().flatten().tolist() == [10]
    case.output.append(6)
    batch.enter(case.sequence(0))
    assert batch.edit(torch.zeros(1, VOCAB))[0].isinf().nonzero().flatten().tolist() == [9, 10]


def test_logprobs_are_from_before_all_of_it() -> None:
    batch = Batch(cases(logprobs=1))
    logits = random_logits(len(batch.cases))
    rows = np.arange(len(batch.cases), dtype=np.int32)
    tokens, table = batch.sampler.sample(logits.clone(), rows, batch.positions(rows))
    assert table is not None
    values = codec.floats(table.logprobs).reshape(-1, 2)
    raw = logits.log_softmax(-1)
    assert values[:, 0] == pytest.approx(raw[rows, tokens].numpy(), abs=1e-5)
    assert values[:, 1] == pytest.approx(raw.amax(-1).numpy(), abs=1e-5)


def test_tokens_outside_the_vocabulary_are_nothing() -> None:
    options = {
        "repetition_penalty": 2.0,
        "logit_bias": {VOCAB: 5.0, 3: 5.0},
        "allowed_token_ids": [VOCAB + 1, 3],
    }
    batch = Batch([Case([VOCAB, VOCAB + 5], [], options)])
    assert batch.edit(torch.zeros(1, VOCAB))[0].isfinite().nonzero().flatten().tolist() == [3]


# --- distributions --------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"temperature": 1.6, "top_k": 25, "top_p": 0.95}], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_the_distribution(name: str, more: dict[str, Any]) -> None:
    draws = 5_000
    options, words = OPTIONS[name]
    case = Case([1, 9, 21, 22, 9], OUTPUT, {**options, **more}, words)
    logits = random_logits(1, 5) / 2
    known = np.full((1, MAX_LENGTH), 7, np.int32)
    known[0, : len(case.prompt + OUTPUT)] = case.prompt + OUTPUT
    # The history must not move, so each draw is the same step under another seed.
    rows = np.arange(draws, dtype=np.int32)
    sampler = Sampler(draws, VOCAB, [EOS], np.repeat(known, draws, 0))
    for row in range(draws):
        sampler.enter(case.sequence(row))
    positions = np.full(draws, len(case.prompt) + len(OUTPUT), np.int32)
    tokens, _ = sampler.sample(logits.repeat(draws, 1), rows, positions)
    counts = np.bincount(tokens, minlength=VOCAB)
    scores = case.expected(logits[0])[None] / more.get("temperature", 1.0)
    if more:
        scores = hf.TopKLogitsWarper(more["top_k"])(None, scores)
        scores = hf.TopPLogitsWarper(more["top_p"])(None, scores)
    check_counts(counts, draws * scores[0].double().softmax(-1).numpy())
