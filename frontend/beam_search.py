"""Beam search on top of an engine that samples: what `LLM.beam_search` does between its steps.

1. A step asks the engine for one token of every live beam of every prompt, all in one batch, and
   for the likeliest ones in its place: 2 * beam_width, so that beam_width remain when some are an
   EOS. The prefix cache has all of a beam but its last block.
2. A continuation by an EOS is done. Of the others the beam_width likeliest are the next beams.
3. It ends when no beam is left, or after max_tokens, or where the context is full. Done and live
   sequences are then ranked by

       cum_logprob / length ** length_penalty

   where length counts the prompt's tokens too, but not an EOS (as vLLM's does; transformers' is the
   output's, which ranks alike where all lengths are equal). The best beam_width are the result.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ..actors.text.text_tokenizer import TextTokenizer, load_tokenizer
from ..mq import codec
from ..mq.config import ModelSpec
from ..mq.errors import InvalidRequestError
from ..mq.messages import TokensPrompt
from ..mq.sampling_params import MAX_LOGPROBS, SamplingParams
from .outputs import Logprob, RequestOutput
from .prompts import ReadPrompt

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2

Ask = Callable[[list[ReadPrompt], SamplingParams], list[RequestOutput]]


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How beams are searched, by vLLM's names.

    beam_width: beams of a prompt, and sequences of its result.
    max_tokens: most tokens to generate.
    ignore_eos: an EOS is a token like any other.
    temperature: log-probabilities are the model's own at any temperature. Above 0, a token that is
        sampled at this temperature is one more continuation of each beam.
    length_penalty: above 0 prefers longer sequences, 0 ignores their length.

    Raises InvalidRequestError (a ValueError) naming the field and what it accepts.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for field, types, allowed, accepted in _FIELDS:
            value = getattr(self, field)
            is_bool = isinstance(value, bool)
            if not isinstance(value, types) or is_bool != (types is bool) or not allowed(value):
                raise InvalidRequestError(
                    f"{field} must be {accepted}, got {repr(value)[:80]}", param=field
                )


_FIELDS: tuple[tuple[str, Any, Callable[[Any], bool], str], ...] = (
    (
        "beam_width",
        int,
        lambda v: 1 <= v <= MAX_BEAM_WIDTH,
        f"an integer from 1 to {MAX_BEAM_WIDTH}",
    ),
    ("max_tokens", int, lambda v: v >= 1, "an integer of at least 1"),
    ("ignore_eos", bool, lambda v: True, "true or false"),
    ("temperature", (int, float), lambda v: 0 <= v < float("inf"), "a number of at least 0"),
    ("length_penalty", (int, float), lambda v: -10 <= v <= 10, "a number from -10 to 10"),
)


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """tokens: of the prompt and what follows it, the EOS too. logprobs: of what follows, as in
    `CompletionOutput`; cum_logprob is the sum of the tokens' own. text: of all tokens, special ones
    shown; None where the model's folder has no tokenizer.json.
    finish_reason: "stop" at an EOS (stop_reason is its id), else "length".
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    def followed_by(self, token: int, row: dict[int, Logprob]) -> BeamSearchSequence:
        logprob = row[token].logprob
        return BeamSearchSequence(
            [*self.tokens, token], [*self.logprobs, row], self.cum_logprob + logprob
        )


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """Of one prompt. sequences: the best first."""

    sequences: list[BeamSearchSequence]


class Search:
    """The beams of one prompt."""

    def __init__(self, prompt: list[int], params: BeamSearchParams, spec: ModelSpec) -> None:
        self.beams = [BeamSearchSequence(prompt)]
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(spec.eos_token_ids)
        self._done: list[BeamSearchSequence] = []
        self._steps_left = min(params.max_tokens, spec.max_model_len - len(prompt))

    @property
    def finished(self) -> bool:
        return not self.beams or not self._steps_left

    def extend(self, rows: list[dict[int, Logprob]]) -> None:
        """A step. rows: for each of the beams, what may follow it."""
        self._steps_left -= 1
        going: list[tuple[float, BeamSearchSequence, int, dict[int, Logprob]]] = []
        for beam, row in zip(self.beams, rows, strict=True):
            for token, entry in row.items():
                if token in self._eos:
                    self._end(beam.followed_by(token, row), "stop", token)
                else:
                    going.append((beam.cum_logprob + entry.logprob, beam, token, row))
        # All are of one length, so no penalty tells them apart.
        best = heapq.nlargest(self._params.beam_width, going, key=lambda candidate: candidate[0])
        self.beams = [beam.followed_by(token, row) for _, beam, token, row in best]

    def result(self) -> BeamSearchOutput:
        for beam in self.beams:
            self._end(beam, "length")
        self.beams = []
        return BeamSearchOutput(self._done)

    def _end(self, beam: BeamSearchSequence, reason: str, stop_reason: int | None = None) -> None:
        """It is done, and kept if it is among the best."""
        beam.finish_reason, beam.stop_reason = reason, stop_reason
        width = self._params.beam_width
        self._done = heapq.nlargest(width, [*self._done, beam], key=self._score)

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.finish_reason == "stop")
        return beam.cum_logprob / math.pow(length, self._params.length_penalty)


def beam_search(
    prompts: list[ReadPrompt], params: BeamSearchParams, spec: ModelSpec, ask: Ask
) -> list[BeamSearchOutput]:
    """ask: has the engine run these prompts, all in one batch."""
    each_step = _step_params(params, spec)
    answers = ask(prompts, each_step)
    searches = [Search(answer.prompt_token_ids, params, spec) for answer in answers]
    live = searches
    while live:
        rows = iter([_likeliest(answer) for answer in answers])
        for search in live:
            search.extend(list(itertools.islice(rows, len(search.beams))))
        live = [search for search in live if not search.finished]
        beams = [beam for search in live for beam in search.beams]
        answers = ask([ReadPrompt(TokensPrompt(codec.pack(b.tokens))) for b in beams], each_step)
    outputs = [search.result() for search in searches]
    if spec.tokenizer_path and (Path(spec.tokenizer_path) / "tokenizer.json").exists():
        tokenizer = _tokenizer(spec.tokenizer_path)
        for sequence in itertools.chain.from_iterable(output.sequences for output in outputs):
            sequence.text = tokenizer.decode(sequence.tokens, skip_special_tokens=False)
    return outputs


def _step_params(params: BeamSearchParams, spec: ModelSpec) -> SamplingParams:
    width = params.beam_width
    asked = width + max(width, len(spec.eos_token_ids))
    return SamplingParams(
        temperature=params.temperature, max_tokens=1, logprobs=min(asked, MAX_LOGPROBS)
    )


def _likeliest(answer: RequestOutput) -> dict[int, Logprob]:
    logprobs = answer.outputs[0].logprobs
    assert logprobs is not None, "an engine answers with as many tokens as were asked for"
    return logprobs[0]


_tokenizer: Callable[[str], TextTokenizer] = functools.lru_cache(maxsize=1)(load_tokenizer)
