"""A stream that is cut at any of its chunks and resumed says what it would have said anyway."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from actors.text.streams import packed_streams
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcast.actors.core import PeerLost
from ringcast.actors.text import token_decoder
from ringcast.actors.text.detokenizer_core import DetokenizerCore
from ringcast.actors.text.logprob_rows import LogprobRow, pack_rows, unpack_rows
from ringcast.actors.text.text_tokenizer import TextTokenizer
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.messages import (
    Chunk,
    Finish,
    OpenStream,
    OutputSpec,
    StopStream,
    StreamEnd,
    StreamStep,
    TokenLogprobs,
)
from ringcast.mq.sampling_params import SamplingParams

FORMS = ("raw", "chat", "completion")


class Case(NamedTuple):
    """A choice. ends_by_stop: its last token is a stop token."""

    tokens: list[int]
    params: SamplingParams
    output: OutputSpec
    ends_by_stop: bool = False

    def end(self, stream: int) -> StreamEnd:
        reason: Any = "stop" if self.ends_by_stop else "length"
        return StreamEnd(stream, reason, len(self.tokens))


class Player:
    """A core, the scheduler before it, and the client behind it."""

    def __init__(self, spec: ModelSpec, tokenizer: TextTokenizer) -> None:
        self.core = DetokenizerCore(spec, tokenizer)
        self.stops: list[StopStream] = []

    def play(
        self,
        case: Case,
        groups: Sequence[int],
        num_resumed: int = 0,
        incarnation: int = 0,
        most: int | None = None,
    ) -> list[Chunk]:
        """The chunks of a choice whose tokens come in groups of these sizes, a flush after each.

        most: so many chunks, then the scheduler is lost.
        """
        resumed = codec.pack(case.tokens[:num_resumed])
        opened = OpenStream(5, "r", incarnation, 1, 4, case.params, case.output, resumed)
        self.core.handle("scheduler.0", opened, 0.0)
        chunks = self._flush()
        sizes = iter([*groups, *[1] * len(case.tokens)])
        place = num_resumed
        while place < len(case.tokens) and (most is None or len(chunks) < most):
            for _ in range(next(sizes)):
                if place < len(case.tokens):
                    self._step(case, place)
                    place += 1
            chunks += self._flush()
        if most is not None:
            self.core.handle("scheduler.0", PeerLost(), 0.0)
            return chunks[:most]
        self.core.handle("scheduler.0", StreamStep(b"", b"", b"", [case.end(5)]), 0.0)
        chunks += self._flush()
        assert self.core.statistics()["streams"] == 0
        return chunks

    def _step(self, case: Case, place: int) -> None:
        token = case.tokens[place]
        is_last = place + 1 == len(case.tokens)
        ends = [case.end(5)] if is_last and case.ends_by_stop else []
        logprobs = logprobs_of(token, case.params.logprobs)
        arrays = (packed_streams([5]), codec.pack([place]), codec.pack([token]))
        self.core.handle("scheduler.0", StreamStep(*arrays, ends, logprobs), 0.0)

    def _flush(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for send in self.core.flush(0.0):
            if isinstance(send.message, StopStream):
                self.stops.append(send.message)
            else:
                chunks += send.message.chunks
        return chunks


def logprobs_of(token: int, num_likeliest: int | None) -> TokenLogprobs | None:
    if num_likeliest is None:
        return None
    ids = [token, *range(300, 300 + num_likeliest)]
    values = [-0.5 * (i + 1) for i in range(len(ids))]
    packed, _ = pack_rows([LogprobRow(0, 1, ids, values, [None] * len(ids))], 0)
    return packed


def resume_point(chunks: list[Chunk], form: str) -> int:
    """How many chunks the client keeps: those whose output it has shown to its user."""
    if form == "raw":
        return len(chunks)
    return max((i + 1 for i, chunk in enumerate(chunks) if chunk.data), default=0)


def num_tokens(chunks: list[Chunk]) -> int:
    ids = b"".join(chunk.token_ids for chunk in chunks)
    return len(ids) // 4


def said(chunks: list[Chunk], form: str) -> tuple[Any, ...]:
    """All that a client learns from the chunks, however it is cut. There must be no gap."""
    finishes = [chunk.finish for chunk in chunks]
    assert all(finish is None for finish in finishes[:-1]), "something comes after the end"
    place = 0
    rows: list[LogprobRow] = []
    for chunk in chunks:
        assert chunk.first_index == place
        place += len(chunk.token_ids) // 4
        if chunk.logprobs is not None:
            rows += unpack_rows(chunk.logprobs, chunk.logprob_tokens, chunk.first_index)
    ids = b"".join(chunk.token_ids for chunk in chunks)
    text = "".join(chunk.text for chunk in chunks)
    events = read_events([chunk.data for chunk in chunks if chunk.data], form)
    return ids, text, rows, finishes[-1:], events


def read_events(events: list[bytes], form: str) -> tuple[Any, ...]:
    """Roles, text, finish reasons and log-probabilities of a stream's events."""
    roles, texts, reasons = [], [], []
    logprobs: dict[str, list[Any]] = {}
    for place, event in enumerate(events):
        (choice,) = json.loads(event[6:])["choices"]
        if form == "chat":
            texts.append(choice["delta"]["content"])
            if "role" in choice["delta"]:
                roles.append((place, choice["delta"]["role"]))
        else:
            texts.append(choice["text"])
        if choice["finish_reason"] is not None:
            reasons.append((choice["finish_reason"], choice["stop_reason"]))
        for name, values in (choice["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    assert len(reasons) <= 1
    assert roles == ([(0, "assistant")] if form == "chat" and events else [])
    return "".join(texts), reasons, logprobs


def check(
    spec: ModelSpec,
    tokenizer: TextTokenizer,
    case: Case,
    groups: Sequence[int],
    cut: int,
    same_core: bool = True,
) -> None:
    """The first `cut` chunks arrive, then the engine is lost, or with another core all of it."""
    form = case.output.form
    whole = Player(spec, tokenizer).play(case, groups)
    player = Player(spec, tokenizer)
    before = player.play(case, groups, most=cut)
    if before and before[-1].finish is not None:
        assert said(before, form) == said(whole, form)
        return
    kept = before[: resume_point(before, form)]
    if not same_core:
        player = Player(spec, tokenizer)
    after = player.play(case, groups[cut:], num_tokens(kept), incarnation=1)
    assert said(kept + after, form) == said(whole, form)
    assert {chunk.incarnation for chunk in after} == {1}


def output(form: Any, delta: bool = True) -> OutputSpec:
    return OutputSpec(0, form, delta, response_id="id", model="tiny", created=1)


@st.composite
def cases(draw: st.DrawFn, tokenizer: TextTokenizer) -> Case:
    text = draw(st.text(st.sampled_from("ab d🦊é字 .\n👩‍👧"), max_size=20))
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6)
    tokens = [*draw(ids), *tokenizer.encode(text), *draw(ids)] or [0]
    stops = st.text(st.sampled_from("abd🦊é .\ufffd"), min_size=1, max_size=3)
    form = draw(st.sampled_from(FORMS))
    params = SamplingParams(
        stop=tuple(draw(st.lists(stops, max_size=3))),
        include_stop_str_in_output=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 8)),
        max_tokens=None,
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        skip_special_tokens=draw(st.booleans()),
    )
    delta = form != "raw" or draw(st.booleans())
    return Case(tokens, params, output(form, delta), draw(st.booleans()))


GROUPS = st.lists(st.integers(1, 3), max_size=30)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), groups=GROUPS, cut=st.integers(0, 30), same_core=st.booleans())
def test_any_cut(
    spec: ModelSpec,
    by_bytes: TextTokenizer,
    data: st.DataObject,
    groups: list[int],
    cut: int,
    same_core: bool,
) -> None:
    check(spec, by_bytes, data.draw(cases(by_bytes)), groups, cut, same_core)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), groups=GROUPS, cut=st.integers(0, 30))
def test_any_cut_with_the_library_s_decoder(
    spec: ModelSpec, word_piece: TextTokenizer, data: st.DataObject, groups: list[int], cut: int
) -> None:
    check(spec, word_piece, data.draw(cases(word_piece)), groups, cut)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("logprobs", [None, 1])
def test_every_cut_of_a_text_with_all_difficulties(
    spec: ModelSpec, byte_level: TextTokenizer, form: str, logprobs: int | None
) -> None:
    text = "a🦊 dog s🦊l dog sleeps, 字 dog slee"
    params = SamplingParams(stop=("dog sleet", "🦊🦊"), max_tokens=None, logprobs=logprobs)
    case = Case(byte_level.encode(text), params, output(form))
    num_chunks = len(Player(spec, byte_level).play(case, []))
    assert num_chunks > 20
    for cut in range(num_chunks + 1):
        check(spec, byte_level, case, [], cut)


def test_checkpoints_are_cut_points(spec: ModelSpec, byte_level: TextTokenizer) -> None:
    tokens = byte_level.encode("The dog 🦊 sleeps. " * 60)[:200]
    case = Case(tokens, SamplingParams(max_tokens=None), output("raw", delta=False))
    whole = Player(spec, byte_level).play(case, [])
    assert [len(chunk.token_ids) // 4 for chunk in whole] == [64, 64, 64, 8]
    for cut in range(5):
        check(spec, byte_level, case, [], cut)


@pytest.mark.parametrize("form", FORMS)
def test_losses_one_after_the_other(spec: ModelSpec, byte_level: TextTokenizer, form: str) -> None:
    tokens = byte_level.encode("One 🦊, two 🦊🦊, three 字字 foxes.")
    case = Case(tokens, SamplingParams(max_tokens=None, logprobs=0), output(form))
    whole = Player(spec, byte_level).play(case, [])
    player = Player(spec, byte_level)
    kept: list[Chunk] = []
    for incarnation in range(20):
        new = player.play(case, [], num_tokens(kept), incarnation, most=1 + incarnation % 4)
        kept += new[: resume_point(new, form)]
        if kept[-1].finish is not None:
            break
    else:
        kept += player.play(case, [], num_tokens(kept), 20)
    assert said(kept, form) == said(whole, form)


def test_a_choice_that_was_complete_ends_without_text(
    spec: ModelSpec, byte_level: TextTokenizer
) -> None:
    tokens = byte_level.encode("The dog")
    case = Case(tokens, SamplingParams(), output("chat"))
    (chunk,) = Player(spec, byte_level).play(case, [], len(tokens), incarnation=2)
    assert (chunk.first_index, chunk.token_ids, chunk.text) == (len(tokens), b"", "")
    assert chunk.finish == Finish("length", 4, len(tokens))
    (choice,) = json.loads(chunk.data[6:])["choices"]
    assert choice["delta"] == {"content": ""}


def test_a_stop_string_in_what_the_client_has_ends_the_stream(
    spec: ModelSpec, byte_level: TextTokenizer
) -> None:
    tokens = byte_level.encode("The dog sleeps")
    case = Case(tokens, SamplingParams(stop=("dog",)), output("raw"))
    player = Player(spec, byte_level)
    (chunk,) = player.play(case, [], len(tokens) - 1, incarnation=1)
    assert (chunk.first_index, chunk.token_ids, chunk.text) == (len(tokens) - 1, b"", "")
    assert chunk.finish is not None
    assert (chunk.finish.reason, chunk.finish.stop_reason) == ("stop", "dog")
    assert player.stops == [StopStream(5, chunk.finish.num_output_tokens)]


def test_what_can_t_be_resumed_costs_one_stream(
    spec: ModelSpec, word_piece: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: token_decoder.LibraryDecoder, token_id: int) -> str:
        raise ValueError("no prefix")

    monkeypatch.setattr(token_decoder.LibraryDecoder, "feed", refuse)
    player = Player(spec, word_piece)
    case = Case([1, 2, 3], SamplingParams(), output("raw"))
    (chunk,) = player.play(case, [], 2, incarnation=1)
    assert (chunk.first_index, chunk.token_ids, chunk.text) == (2, b"", "")
    assert chunk.finish is not None
    assert chunk.finish.error is not None
    assert "can't be resumed: no prefix" in chunk.finish.error.message
    assert player.stops == [StopStream(5, 1)]
