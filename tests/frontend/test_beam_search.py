"""Beam search against a table of probabilities: against all sequences there are, step by step, and
what it asks an engine for.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from ringcast.frontend.beam_search import (
    BeamSearchOutput,
    BeamSearchParams,
    beam_search,
)
from ringcast.frontend.llm import LLM
from ringcast.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from ringcast.frontend.prompts import ReadPrompt, tokens_prompt
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import InvalidRequestError
from ringcast.mq.messages import TokensPrompt
from ringcast.mq.sampling_params import SamplingParams

EOS = 2


class Table:
    """An engine whose next token depends on all tokens so far, by chance and for ever."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.asked: list[list[list[int]]] = []
        self.params: list[SamplingParams] = []

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        chance = random.Random(repr([*tokens]))
        weights = [chance.random() ** 2 + 1e-3 for _ in range(self.vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def __call__(self, prompts: list[ReadPrompt], params: SamplingParams) -> list[RequestOutput]:
        tokens = [codec.ints(prompt.prompt.token_ids).tolist() for prompt in prompts]  # type: ignore[union-attr]
        self.asked.append(tokens)
        self.params.append(params)
        return [self._answer(each, params.logprobs or 0) for each in tokens]

    def _answer(self, tokens: list[int], count: int) -> RequestOutput:
        ranked = sorted(enumerate(self.logprobs(tokens)), key=lambda pair: -pair[1])[:count]
        row = {token: Logprob(logprob) for token, logprob in ranked}
        choice = CompletionOutput(0, "", [ranked[0][0]], logprobs=[row])
        return RequestOutput("r", None, tokens, [choice], finished=True)


def search(
    spec: ModelSpec, prompts: list[list[int]], table: Table, **params: Any
) -> list[BeamSearchOutput]:
    asked = [ReadPrompt(tokens_prompt(prompt, 1000, "prompt")) for prompt in prompts]
    return beam_search(asked, BeamSearchParams(**params), spec, table)


def everything(
    table: Table, prompt: list[int], steps: int, length_penalty: float
) -> list[tuple[float, list[int]]]:
    """All sequences of so many tokens, or fewer and an EOS, by falling score."""
    found = {}
    for continuation in itertools.product(range(table.vocab_size), repeat=steps):
        tokens, total = list(prompt), 0.0
        for token in continuation:
            total += table.logprobs(tokens)[token]
            tokens.append(token)
            if token == EOS:
                break
        found[tuple(tokens)] = total / (len(tokens) - (tokens[-1] == EOS)) ** length_penalty
    return sorted(((score, [*tokens]) for tokens, score in found.items()), reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0, -2.0])
def test_with_room_for_all_it_finds_the_best_of_all(spec: ModelSpec, length_penalty: float) -> None:
    table, prompt = Table(3), [5, 6]
    params = {"beam_width": 9, "max_tokens": 3, "length_penalty": length_penalty}
    (output,) = search(spec, [prompt], table, **params)
    best = everything(table, prompt, 3, length_penalty)[:9]
    assert [beam.tokens for beam in output.sequences] == [tokens for _, tokens in best]
    for beam, (score, tokens) in zip(output.sequences, best, strict=True):
        ended = tokens[-1] == EOS
        length = len(tokens) - ended
        assert beam.cum_logprob == pytest.approx(score * length**length_penalty)
        assert (beam.finish_reason, beam.stop_reason) == (
            ("stop", EOS) if ended else ("length", None)
        )
        assert len(beam.logprobs) == len(tokens) - len(prompt)
        own = [row[t].logprob for row, t in zip(beam.logprobs, tokens[2:], strict=True)]
        assert sum(own) == pytest.approx(beam.cum_logprob)
        assert beam.text is None  # there is no tokenizer.json


def test_beams_are_the_best_continuations_of_beams(spec: ModelSpec) -> None:
    table, width = Table(40), 3
    (output,) = search(spec, [[7]], table, beam_width=width, max_tokens=6, ignore_eos=True)
    beams = [(0.0, [7])]
    for _ in range(6):
        beams = sorted(
            (
                (total + logprob, [*tokens, token])
                for total, tokens in beams
                for token, logprob in enumerate(table.logprobs(tokens))
            ),
            reverse=True,
        )[:width]
    assert [beam.tokens for beam in output.sequences] == [tokens for _, tokens in beams]


def test_one_beam_is_greedy(spec: ModelSpec) -> None:
    table, tokens = Table(50), [9]
    (output,) = search(spec, [tokens], table, beam_width=1, max_tokens=8, ignore_eos=True)
    for _ in range(8):
        logprobs = table.logprobs(tokens)
        tokens = [*tokens, logprobs.index(max(logprobs))]
    assert [beam.tokens for beam in output.sequences] == [tokens]


def test_prompts_together_as_alone_and_one_step_asks_for_all(spec: ModelSpec) -> None:
    prompts = [[1], [3, 4], [5, 6, 7]]
    params: dict[str, Any] = {"beam_width": 4, "max_tokens": 5, "ignore_eos": True}
    table = Table(30)
    together = search(spec, prompts, table, **params)
    assert together == [search(spec, [prompt], Table(30), **params)[0] for prompt in prompts]
    assert [len(asked) for asked in table.asked if asked] == [3, 12, 12, 12, 12]
    assert {(p.logprobs, p.max_tokens, p.temperature) for p in table.params} == {(8, 1, 0.0)}


def test_enough_continuations_are_asked_for_where_several_tokens_end(spec: ModelSpec) -> None:
    spec = msgspec.structs.replace(spec, eos_token_ids=[0, 1, 2, 3])
    table = Table(6)
    (output,) = search(spec, [[9]], table, beam_width=1, max_tokens=3)
    assert table.params[0].logprobs == 5
    assert len(table.asked) > 1, "a beam must go on past the likeliest tokens, which all end"
    assert len(output.sequences) == 1


def test_the_context_ends_it(spec: ModelSpec) -> None:
    spec = msgspec.structs.replace(spec, max_model_len=6)
    outputs = search(spec, [[1, 1, 1], [4]], Table(9), beam_width=2, max_tokens=9, ignore_eos=True)
    for output in outputs:
        assert [len(beam.tokens) for beam in output.sequences] == [6, 6]
        assert {beam.finish_reason for beam in output.sequences} == {"length"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beam_width": 0}, "beam_width must be an integer from 1 to 10, got 0"),
        ({"beam_width": 11}, "beam_width must be an integer from 1 to 10, got 11"),
        ({"beam_width": True}, "beam_width must be"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"max_tokens": None}, "max_tokens must be"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"temperature": -0.1}, "temperature must be a number of at least 0"),
        ({"temperature": math.inf}, "temperature must be"),
        ({"length_penalty": math.nan}, "length_penalty must be a number from -10 to 10"),
        ({"length_penalty": "1"}, "length_penalty must be"),
    ],
)
def test_bad_params_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    fields: dict[str, Any] = {"beam_width": 2, "max_tokens": 5, **change}
    with pytest.raises(InvalidRequestError, match=words) as refused:
        BeamSearchParams(**fields)
    assert refused.value.param == next(iter(change))


def test_llm_asks_its_engine(connection: Any, engine: Any) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=2, temperature=0.5)
    with LLM() as llm:
        (output,) = llm.beam_search("a", params)
        with pytest.raises(InvalidRequestError, match="prompt must be"):
            llm.beam_search([5.0], params)  # type: ignore[list-item]
    # The fake engine's tokens are 100 at -0.5, 0 at -1, 1 at -2, 2 (its EOS) at -3.
    assert [beam.tokens for beam in output.sequences] == [[7, 8, 9, 100, 100], [7, 8, 9, 100, 0]]
    assert [beam.cum_logprob for beam in output.sequences] == [-1.0, -1.5]
    beams = [request.prompt for request in engine.generated[1:]]
    assert beams == [TokensPrompt(codec.pack([7, 8, 9, token])) for token in (100, 0)]
    assert {request.params.temperature for request in engine.generated} == {0.5}
