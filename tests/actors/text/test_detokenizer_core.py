"""Streams of tokens become chunks: text, stop strings, ends, counts, rendered events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcast.actors.core import PeerLost, Send
from ringcast.actors.text import token_decoder
from ringcast.actors.text.detokenizer_core import DetokenizerCore
from ringcast.actors.text.logprob_rows import unpack_rows
from ringcast.actors.text.text_tokenizer import TextTokenizer
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.messages import (
    Chunk,
    Chunks,
    ErrorInfo,
    Message,
    OpenStream,
    OutputSpec,
    Ping,
    PromptLogprobs,
    ResetPrefixCache,
    StopStream,
    StreamEnd,
    StreamStep,
    TokenLogprobs,
)
from ringcast.mq.sampling_params import SamplingParams

Entry = tuple[int, int, int]  # stream, token index, token id


class Driver:
    """A core, and what it has sent."""

    def __init__(self, spec: ModelSpec, tokenizer: TextTokenizer) -> None:
        self.core = DetokenizerCore(spec, tokenizer)
        self.tokenizer = tokenizer
        self.chunks: dict[str, list[Chunk]] = {}
        self.stops: list[StopStream] = []

    def open(
        self, stream: int, client: int = 0, choice: int = 0, incarnation: int = 0, **options: Any
    ) -> None:
        names = ("form", "delta", "null_usage", "index_offset", "tokens_as_ids", "continuous_usage")
        output = {name: options.pop(name) for name in names if name in options}
        output.setdefault("delta", True)
        params = SamplingParams(**options)
        spec = OutputSpec(client, response_id="id", model="tiny", created=1, **output)
        opened = OpenStream(stream, f"r{stream}", incarnation, choice, 5, params, spec)
        assert list(self.core.handle("scheduler.0", opened, 0.0)) == []

    def step(
        self,
        entries: Sequence[Entry],
        ends: Sequence[StreamEnd] = (),
        logprobs: TokenLogprobs | None = None,
        cached: Sequence[tuple[int, int]] = (),
        prompt_logprobs: Sequence[PromptLogprobs] = (),
    ) -> None:
        columns = [codec.pack([entry[i] for entry in entries]) for i in range(3)]
        step = StreamStep(*columns, list(ends), logprobs, list(cached), list(prompt_logprobs))
        assert list(self.core.handle("scheduler.0", step, 0.0)) == []

    def flush(self) -> None:
        clients = []
        for send in self.core.flush(0.0):
            if isinstance(send.message, StopStream):
                assert send.to == "scheduler.0"
                self.stops.append(send.message)
                continue
            assert isinstance(send.message, Chunks)
            clients.append(send.to)
            for chunk in send.message.chunks:
                self.chunks.setdefault(chunk.request_id, []).append(chunk)
        assert len(clients) == len(set(clients))

    def say(self, stream: int, text: str, first: int = 0, cuts: Sequence[int] = ()) -> int:
        """A stream's tokens of `text`, a step each; returns the index of the next one."""
        ids = self.tokenizer.encode(text)
        for i, token_id in enumerate(ids):
            self.step([(stream, first + i, token_id)])
            if not cuts or i in cuts:
                self.flush()
        return first + len(ids)

    def end(self, stream: int, reason: str, num_tokens: int, **more: Any) -> None:
        self.step([], [StreamEnd(stream, reason, num_tokens, **more)])
        self.flush()

    def text(self, stream: int) -> str:
        return "".join(chunk.text for chunk in self.chunks.get(f"r{stream}", []))

    def ids(self, stream: int) -> list[int]:
        """All ids sent, with a check that the ledger has no gap."""
        ids: list[int] = []
        for chunk in self.chunks.get(f"r{stream}", []):
            assert chunk.first_index == len(ids)
            ids += codec.ints(chunk.token_ids).tolist()
        return ids

    def last(self, stream: int) -> Chunk:
        chunks = self.chunks[f"r{stream}"]
        assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        return chunks[-1]


@pytest.fixture
def driver(spec: ModelSpec, byte_level: TextTokenizer) -> Driver:
    return Driver(spec, byte_level)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4),
    delta=st.booleans(),
    end_late=st.booleans(),
    moves=st.lists(st.integers(0, 7), max_size=60),
)
def test_streams_add_up(
    spec: ModelSpec,
    byte_level: TextTokenizer,
    texts: list[str],
    delta: bool,
    end_late: bool,
    moves: list[int],
) -> None:
    """A move is the stream that speaks next, or a flush; after them all speak to their end."""
    driver = Driver(spec, byte_level)
    ids = {stream: byte_level.encode(text) for stream, text in enumerate(texts)}
    todo = {stream: list(enumerate(tokens)) for stream, tokens in ids.items()}
    for stream in todo:
        driver.open(stream, client=stream % 2, delta=delta, form="chat")
    rest = [stream for stream, pairs in todo.items() for _ in pairs]
    for stream in moves + rest:
        if todo.get(stream):
            entry = (stream, *todo[stream].pop(0))
            ends = [] if todo[stream] else [StreamEnd(stream, "length", len(ids[stream]))]
            driver.step([entry], [] if end_late else ends)
            if end_late and ends:
                driver.step([], ends)
        elif stream not in todo:
            driver.flush()
    driver.flush()
    for stream, text in enumerate(texts):
        assert driver.text(stream) == text
        assert driver.ids(stream) == ids[stream]
        finish = driver.last(stream).finish
        assert finish is not None
        assert (finish.reason, finish.num_output_tokens) == ("length", len(ids[stream]))
        events = [chunk.data for chunk in driver.chunks[f"r{stream}"]]
        assert delta or events == [b""]
        contents = [json.loads(e[6:])["choices"][0]["delta"]["content"] for e in events if e]
        assert not delta or "".join(contents) == text
    assert driver.core.statistics()["streams"] == 0


def test_a_flush_is_one_message_for_each_client(driver: Driver) -> None:
    for stream in range(4):
        driver.open(stream, client=stream // 2, incarnation=2)
    a, b = driver.tokenizer.encode("a") + driver.tokenizer.encode("b")
    driver.step([(stream, 0, a) for stream in range(4)])
    driver.step([(stream, 1, b) for stream in range(4)])
    sends = list(driver.core.flush(0.0))
    assert [(send.to, len(send.message.chunks)) for send in sends] == [
        ("client.0", 2),
        ("client.1", 2),
    ]
    chunk = sends[0].message.chunks[0]
    assert (chunk.request_id, chunk.incarnation, chunk.text) == ("r0", 2, "ab")
    assert list(driver.core.flush(0.0)) == []
    assert driver.core.statistics() == {"streams": 4, "tokens": 8, "chunks": 4, "dropped": 0}


def test_ids_are_sent_though_no_text_is_ready(driver: Driver) -> None:
    driver.open(1, form="chat")
    first, *rest = driver.tokenizer.encode("🦊")
    driver.step([(1, 0, first)])
    driver.flush()
    assert driver.ids(1) == [first]
    assert (driver.last(1).text, driver.last(1).data) == ("", b"")
    driver.step([(1, i + 1, token_id) for i, token_id in enumerate(rest)])
    driver.flush()
    assert driver.text(1) == "🦊"
    assert b'"role":"assistant"' in driver.last(1).data


def test_half_a_character_at_the_end(driver: Driver) -> None:
    driver.open(1)
    driver.step([(1, 0, driver.tokenizer.encode("🦊")[0])])
    driver.end(1, "length", 1)
    assert driver.text(1) == "\ufffd"


@pytest.mark.parametrize("include", [False, True])
def test_stop_string(driver: Driver, include: bool) -> None:
    text, stop = "The dog sleeps.\n\nUser: hi", "\n\nUser:"
    driver.open(1, stop=(stop,), include_stop_str_in_output=include, form="completion")
    driver.say(1, text)
    assert driver.text(1) == "The dog sleeps." + (stop if include else "")
    finish = driver.last(1).finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason, finish.num_prompt_tokens) == ("stop", stop, 5)
    # The tokens up to the one that completed the string count, and no other was sent on.
    num_tokens = finish.num_output_tokens
    assert len(driver.ids(1)) == num_tokens
    assert stop in driver.tokenizer.decode(driver.ids(1))
    assert stop not in driver.tokenizer.decode(driver.ids(1)[:-1])
    assert driver.stops == [StopStream(1, num_tokens)]
    event = json.loads(driver.last(1).data[6:])["choices"][0]
    assert (event["finish_reason"], event["stop_reason"]) == ("stop", stop)


def test_nothing_more_is_said_after_a_stop_string(driver: Driver) -> None:
    driver.open(1, stop=("dog",))
    num_tokens = driver.say(1, "The lazy dog")
    driver.flush()
    num_chunks = len(driver.chunks["r1"])
    driver.say(1, " and more dog", num_tokens)
    driver.end(1, "stop", num_tokens)
    assert len(driver.chunks["r1"]) == num_chunks
    assert driver.stops == [StopStream(1, num_tokens)]
    assert driver.core.statistics()["streams"] == 0


def test_stop_string_and_end_in_one_batch(driver: Driver) -> None:
    driver.open(1, stop=("dog",))
    ids = driver.tokenizer.encode("The lazy dog")
    entries = [(1, i, token_id) for i, token_id in enumerate(ids)]
    driver.step(entries, [StreamEnd(1, "length", len(ids))])
    driver.flush()
    finish = driver.last(1).finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason) == ("stop", "dog")
    assert driver.stops == []  # the scheduler has ended it already


def test_held_text_is_released_by_the_end(driver: Driver) -> None:
    driver.open(1, stop=("dog sleeps",))
    num_tokens = driver.say(1, "The lazy dog sl")
    assert driver.text(1) == "The lazy "
    driver.end(1, "length", num_tokens)
    assert driver.text(1) == "The lazy dog sl"
    assert driver.stops == []


def test_min_tokens(driver: Driver) -> None:
    ids = driver.tokenizer.encode("xxxx")
    assert len(ids) == 4
    for stream, min_tokens in enumerate((0, 2, 3)):
        driver.open(stream, stop=("x",), min_tokens=min_tokens)
        driver.say(stream, "xxxx")
        assert driver.text(stream) == "x" * max(0, min_tokens - 1)
        finish = driver.last(stream).finish
        assert finish is not None
        assert finish.num_output_tokens == max(1, min_tokens)


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_is_no_text(driver: Driver, include: bool) -> None:
    bang = driver.tokenizer.encode("!")[0]
    options = {"stop_token_ids": (bang,), "include_stop_str_in_output": include}
    driver.open(1, form="completion", **options)
    num_tokens = driver.say(1, "The dog!")
    driver.open(2, form="completion", **options)
    ids = driver.tokenizer.encode("The dog!")
    for i, token_id in enumerate(ids):
        ends = [StreamEnd(2, "stop", i + 1, stop_reason=bang)]
        cached = [(2, 4)] if i == 0 else []
        driver.step([(2, i, token_id)], ends if token_id == bang else [], cached=cached)
        driver.flush()
    assert driver.text(1) == "The dog!"  # not ended by it: ignored
    assert driver.text(2) == ("The dog!" if include else "The dog")
    assert driver.ids(2) == ids
    finish = driver.last(2).finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason) == ("stop", bang)
    assert (finish.num_output_tokens, finish.num_cached_tokens) == (num_tokens, 4)


def test_special_tokens(driver: Driver) -> None:
    ids = driver.tokenizer.encode("a<s>b<tool>")
    for stream, skip in enumerate((True, False)):
        driver.open(stream, skip_special_tokens=skip)
        driver.step([(stream, i, token_id) for i, token_id in enumerate(ids)])
    driver.flush()
    assert (driver.text(0), driver.text(1)) == ("ab<tool>", "a<s>b<tool>")


def test_duplicates_are_dropped(driver: Driver) -> None:
    driver.open(1)
    a, b = driver.tokenizer.encode("a")[0], driver.tokenizer.encode("b")[0]
    driver.step([(1, 0, a), (1, 0, a), (1, 1, b)])
    driver.step([(1, 0, a), (1, 1, b), (1, 2, a)])
    driver.step([(9, 0, a)], [StreamEnd(8, "stop", 1)])
    driver.flush()
    assert (driver.text(1), driver.ids(1)) == ("aba", [a, b, a])
    assert driver.core.statistics()["dropped"] == 5


@pytest.mark.parametrize("form", ["raw", "chat"])
def test_a_gap_ends_that_stream_alone(driver: Driver, form: str) -> None:
    driver.open(1, form=form)
    driver.open(2, form=form)
    a = driver.tokenizer.encode("a")[0]
    driver.step([(1, 0, a), (2, 0, a)])
    driver.step([(1, 2, a), (2, 1, a)])
    driver.flush()
    chunk = driver.last(1)
    assert chunk.finish is not None
    assert chunk.finish.error is not None
    assert (chunk.finish.reason, chunk.finish.num_output_tokens, chunk.data) == ("error", 1, b"")
    assert chunk.finish.error.status == 500
    assert "token 2 arrived after 1 tokens" in chunk.finish.error.message
    assert driver.stops == [StopStream(1, 1)]
    assert driver.text(2) == "aa"
    driver.end(1, "stop", 1)
    driver.end(2, "length", 2)
    assert driver.core.statistics()["streams"] == 0


def test_an_end_that_counts_otherwise_is_an_error(driver: Driver) -> None:
    driver.open(1)
    num_tokens = driver.say(1, "a")
    driver.end(1, "length", num_tokens + 1)
    finish = driver.last(1).finish
    assert finish is not None
    assert finish.error is not None
    assert "ended after 2 tokens, 1 arrived" in finish.error.message


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_abort_and_error_pass_through_without_an_event(driver: Driver, reason: str) -> None:
    error = ErrorInfo("out of luck", 500, "server_error") if reason == "error" else None
    driver.open(1, form="chat", stop=("abc",))
    num_tokens = driver.say(1, "xab")
    driver.end(1, reason, num_tokens, error=error)
    chunk = driver.last(1)
    assert chunk.finish is not None
    assert (chunk.finish.reason, chunk.finish.error, chunk.data) == (reason, error, b"")
    assert chunk.finish.num_output_tokens == num_tokens
    assert driver.text(1) == "xab"


def test_whole_choices_are_one_chunk(driver: Driver) -> None:
    for choice in range(2):
        driver.open(choice, choice=choice, form="chat", delta=False)
        num_tokens = driver.say(choice, "The dog")
        assert driver.chunks.get(f"r{choice}") is None
        driver.end(choice, "length", num_tokens)
        (chunk,) = driver.chunks[f"r{choice}"]
        assert (chunk.choice, chunk.text, chunk.data) == (choice, "The dog", b"")
        assert codec.ints(chunk.token_ids).tolist() == driver.tokenizer.encode("The dog")


def chunk_sizes(driver: Driver, stream: int) -> list[int]:
    return [len(chunk.token_ids) // 4 for chunk in driver.chunks[f"r{stream}"]]


def test_whole_choices_send_a_checkpoint_now_and_then(driver: Driver) -> None:
    ids = driver.tokenizer.encode("The dog sleeps. " * 40)[:150]
    driver.open(1, delta=False)
    driver.open(2, delta=False, incarnation=1)
    driver.open(3, delta=False)
    for i, token_id in enumerate(ids):
        driver.step([(1, i, token_id), (2, i, token_id), (3, i, token_id)])
        if i not in (62, 63, 64):
            driver.flush()
    driver.end(1, "length", 150)
    driver.end(2, "length", 150)
    assert chunk_sizes(driver, 1) == [66, 64, 20]
    assert chunk_sizes(driver, 2) == [*[8] * 7, 10, *[8] * 10, 4]
    assert chunk_sizes(driver, 3) == [66, 64]
    for stream in (1, 2):
        assert driver.ids(stream) == ids
        assert driver.text(stream) == driver.tokenizer.decode(ids)


def test_a_lost_scheduler_s_streams_are_forgotten(driver: Driver) -> None:
    driver.open(1)
    driver.open(2, stop=("d",))
    driver.say(1, "The ")
    driver.step([(1, 9, 0), (2, 0, driver.tokenizer.encode("d")[0])])  # a gap, and a stop string
    for name in ("client.0", "tokenizer.0"):
        assert list(driver.core.handle(name, PeerLost(), 0.0)) == []
    assert driver.core.statistics()["streams"] == 2
    assert list(driver.core.handle("scheduler.0", PeerLost(), 0.0)) == []
    assert list(driver.core.flush(0.0)) == []
    statistics = driver.core.statistics()
    assert statistics["streams"] == 0
    driver.step([(1, 1, 0)], [StreamEnd(1, "length", 2)], cached=[(2, 4)])
    driver.flush()
    assert driver.core.statistics()["dropped"] == statistics["dropped"] + 2
    driver.open(2)  # the next scheduler counts from 0 again
    driver.say(2, "dog")
    assert driver.text(2) == "dog"


@pytest.mark.parametrize("message", [Ping(3, 8), ResetPrefixCache(3, "x")])
def test_what_passes_through_goes_to_its_client(driver: Driver, message: Message) -> None:
    assert list(driver.core.handle("scheduler.0", message, 0.0)) == [Send("client.3", message)]


def step_logprobs(rows: dict[int, list[tuple[int, float]]], width: int) -> TokenLogprobs:
    ids = np.full((len(rows), width), -1, np.int32)
    values = np.full((len(rows), width), -np.inf, np.float32)
    for i, row in enumerate(rows.values()):
        ids[i, : len(row)] = [token_id for token_id, _ in row]
        values[i, : len(row)] = [value for _, value in row]
    index, rank = codec.pack(rows), codec.pack([1] * len(rows))
    return TokenLogprobs(width, index, ids.tobytes(), values.tobytes(), rank)


@pytest.mark.parametrize("delta", [True, False])
def test_logprobs(driver: Driver, delta: bool) -> None:
    a, b, c = (driver.tokenizer.encode(letter)[0] for letter in "abc")
    driver.open(1, logprobs=1, form="chat", delta=delta)
    driver.open(2, form="chat", delta=delta)
    driver.open(3, logprobs=0, form="chat", delta=delta)
    for i in range(3):
        rows = {1: [(a, -0.5), (a, -0.5), (b, -1.5)], 2: [(c, -0.25), (c, -0.25), (b, -1.5)]}
        driver.step([(2, i, b), (1, i, a), (3, i, c)], logprobs=step_logprobs(rows, 3))
        if i != 1:
            driver.flush()
    for stream in (1, 2, 3):
        driver.end(stream, "length", 3)

    def rows_of(stream: int) -> list[Any]:
        return [
            (row.place, row.token_ids, row.logprobs, row.texts)
            for chunk in driver.chunks[f"r{stream}"]
            if chunk.logprobs is not None
            for row in unpack_rows(chunk.logprobs, chunk.logprob_tokens, chunk.first_index)
        ]

    assert rows_of(1) == [(i, [a, a], [-0.5, -0.5], [b"a", b"a"]) for i in range(3)]
    assert rows_of(2) == []
    assert rows_of(3) == [(i, [c], [-0.25], [b"c"]) for i in range(3)]
    if delta:
        events = [json.loads(c.data[6:])["choices"][0] for c in driver.chunks["r1"]]
        assert [len(e["logprobs"]["content"]) if e["logprobs"] else 0 for e in events] == [1, 2, 0]


def test_logprobs_of_held_text_are_in_the_next_event(driver: Driver) -> None:
    a, b = driver.tokenizer.encode("a")[0], driver.tokenizer.encode("b")[0]
    driver.open(1, logprobs=0, form="chat", stop=("ac",))
    for i, token_id in enumerate((a, b)):
        driver.step([(1, i, token_id)], logprobs=step_logprobs({0: [(token_id, -0.5)]}, 1))
        driver.flush()
    first, second = driver.chunks["r1"]
    assert first.logprobs is not None
    assert first.data == b""
    content = json.loads(second.data[6:])["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b"]


@pytest.mark.parametrize("delta", [True, False])
def test_tokens_by_their_ids(driver: Driver, delta: bool) -> None:
    a = driver.tokenizer.encode("a")[0]
    driver.open(
        1, logprobs=1, prompt_logprobs=0, form="completion", delta=delta, tokens_as_ids=True
    )
    rows = step_logprobs({0: [(a, -0.5), (70, -0.25)]}, 2)
    driver.step([(1, 0, a)], logprobs=rows, prompt_logprobs=[prompt_part(1, 1, [10])])
    driver.end(1, "length", 1)
    driver.flush()
    first = driver.chunks["r1"][0]
    assert first.text == "a"
    assert first.logprob_tokens == [b"token_id:%d" % a, b"token_id:70"]
    assert first.prompt_logprob_tokens[0] == b"token_id:10"
    if delta:
        (choice,) = json.loads(first.data[6:])["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{a}"]


def test_usage_so_far_counts_tokens_without_text(driver: Driver) -> None:
    driver.open(1, form="chat", continuous_usage=True, stop=("ac",))
    a, b = (driver.tokenizer.encode(letter)[0] for letter in "ab")
    for i, token_id in enumerate((a, b)):
        driver.step([(1, i, token_id)])
        driver.flush()
    driver.end(1, "length", 2)
    driver.flush()
    usages = [json.loads(c.data[6:])["usage"] for c in driver.chunks["r1"] if c.data]
    expected = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert usages == [expected, expected]


def prompt_part(stream: int, first: int, ids: Sequence[int]) -> PromptLogprobs:
    rows = {at: [(token_id, -0.5), (token_id + 1, -1.0)] for at, token_id in enumerate(ids)}
    return PromptLogprobs(stream, first, step_logprobs(rows, 2))


@pytest.mark.parametrize("delta", [True, False])
def test_prompt_logprobs(driver: Driver, delta: bool) -> None:
    driver.open(1, prompt_logprobs=1, delta=delta)
    driver.open(2, prompt_logprobs=0, delta=delta)
    driver.step([], prompt_logprobs=[prompt_part(1, 1, [10, 11]), prompt_part(9, 1, [10])])
    driver.flush()
    assert driver.chunks == {}
    # Preempted before its first token: all of it comes again.
    again = [prompt_part(1, 1, [10]), prompt_part(1, 2, [11, 12]), prompt_part(1, 4, [13])]
    driver.step([(1, 0, 70), (2, 0, 70)], prompt_logprobs=[*again, prompt_part(2, 1, [20])])
    driver.flush()
    for stream in (1, 2):
        driver.end(stream, "length", 1)
    first, *rest = driver.chunks["r1"]
    assert first.prompt_logprobs is not None
    assert all(chunk.prompt_logprobs is None for chunk in rest)
    rows = unpack_rows(first.prompt_logprobs, first.prompt_logprob_tokens)
    assert [row.place for row in rows] == [1, 2, 3, 4]
    assert [row.token_ids for row in rows] == [[i, i + 1] for i in (10, 11, 12, 13)]
    other = driver.chunks["r2"][0]
    assert other.prompt_logprobs is not None
    assert [
        row.token_ids for row in unpack_rows(other.prompt_logprobs, other.prompt_logprob_tokens)
    ] == [[20]]


def test_a_gap_in_prompt_logprobs_costs_one_stream(driver: Driver) -> None:
    driver.open(1, prompt_logprobs=1)
    driver.step([], prompt_logprobs=[prompt_part(1, 2, [10])])
    driver.flush()
    finish = driver.last(1).finish
    assert finish is not None
    assert finish.error is not None
    assert "prompt_logprobs from 2 on arrived after 0" in finish.error.message
    assert driver.stops == [StopStream(1, 0)]


@pytest.mark.parametrize("delta", [True, False])
def test_no_text_without_detokenize(driver: Driver, delta: bool) -> None:
    driver.open(1, detokenize=False, include_stop_str_in_output=True, delta=delta)
    count = driver.say(1, "The dog")
    driver.flush()
    driver.end(1, "length", count)
    assert driver.text(1) == ""
    ids = [i for chunk in driver.chunks["r1"] for i in codec.ints(chunk.token_ids).tolist()]
    assert ids == driver.tokenizer.encode("The dog")


def test_tokens_that_the_library_refuses_cost_one_stream(
    spec: ModelSpec, word_piece: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = token_decoder.LibraryDecoder.feed

    def refuse(self: token_decoder.LibraryDecoder, token_id: int) -> str:
        if token_id == 3:
            raise ValueError("no prefix")
        return feed(self, token_id)

    monkeypatch.setattr(token_decoder.LibraryDecoder, "feed", refuse)
    driver = Driver(spec, word_piece)
    driver.open(1)
    driver.open(2)
    driver.step([(1, 0, 1), (2, 0, 1)])
    driver.step([(1, 1, 3), (2, 1, 4)])
    driver.end(2, "length", 2)
    finish = driver.last(1).finish
    assert finish is not None
    assert finish.error is not None
    assert "token 3 can't be decoded: no prefix" in finish.error.message
    assert driver.text(2) == "the fox"
