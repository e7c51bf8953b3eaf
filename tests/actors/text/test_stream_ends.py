"""What ends a stream: stop strings, stop tokens, and what the scheduler says of its end."""

from __future__ import annotations

import json

import pytest
from actors.text.streams import Streams

from ringcast.actors.text import token_decoder
from ringcast.actors.text.text_tokenizer import TextTokenizer
from ringcast.mq.config import ModelSpec
from ringcast.mq.messages import ErrorInfo, StopStream, StreamEnd


def test_half_a_character_at_the_end(streams: Streams) -> None:
    streams.open(1)
    streams.step([(1, 0, streams.tokenizer.encode("🦊")[0])])
    streams.end(1, "length", 1)
    assert streams.text(1) == "\ufffd"


@pytest.mark.parametrize("include", [False, True])
def test_stop_string(streams: Streams, include: bool) -> None:
    text, stop = "The dog sleeps.\n\nUser: hi", "\n\nUser:"
    streams.open(1, stop=(stop,), include_stop_str_in_output=include, form="completion")
    streams.say(1, text)
    assert streams.text(1) == "The dog sleeps." + (stop if include else "")
    finish = streams.last(1).finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason, finish.num_prompt_tokens) == ("stop", stop, 5)
    # The tokens up to the one that completed the string count, and no other was sent on.
    num_tokens = finish.num_output_tokens
    assert len(streams.ids(1)) == num_tokens
    assert stop in streams.tokenizer.decode(streams.ids(1))
    assert stop not in streams.tokenizer.decode(streams.ids(1)[:-1])
    assert streams.stops == [StopStream(1, num_tokens)]
    event = json.loads(streams.last(1).data[6:])["choices"][0]
    assert (event["finish_reason"], event["stop_reason"]) == ("stop", stop)


def test_nothing_more_is_said_after_a_stop_string(streams: Streams) -> None:
    streams.open(1, stop=("dog",))
    num_tokens = streams.say(1, "The lazy dog")
    streams.flush()
    num_chunks = len(streams.chunks["r1"])
    streams.say(1, " and more dog", num_tokens)
    streams.end(1, "stop", num_tokens)
    assert len(streams.chunks["r1"]) == num_chunks
    assert streams.stops == [StopStream(1, num_tokens)]
    assert streams.core.statistics()["streams"] == 0


def test_stop_string_and_end_in_one_batch(streams: Streams) -> None:
    streams.open(1, stop=("dog",))
    ids = streams.tokenizer.encode("The lazy dog")
    entries = [(1, i, token_id) for i, token_id in enumerate(ids)]
    streams.step(entries, [StreamEnd(1, "length", len(ids))])
    streams.flush()
    finish = streams.last(1).finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason) == ("stop", "dog")
    assert streams.stops == []  # the scheduler has ended it already


def test_held_text_is_released_by_the_end(streams: Streams) -> None:
    streams.open(1, stop=("dog sleeps",))
    num_tokens = streams.say(1, "The lazy dog sl")
    assert streams.text(1) == "The lazy "
    streams.end(1, "length", num_tokens)
    assert streams.text(1) == "The lazy dog sl"
    assert streams.stops == []


def test_min_tokens(streams: Streams) -> None:
    ids = streams.tokenizer.encode("xxxx")
    assert len(ids) == 4
    for stream, min_tokens in enumerate((0, 2, 3)):
        streams.open(stream, stop=("x",), min_tokens=min_tokens)
        streams.say(stream, "xxxx")
        assert streams.text(stream) == "x" * max(0, min_tokens - 1)
        finish = streams.last(stream).finish
        assert finish is not None
        assert finish.num_output_tokens == max(1, min_tokens)


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_is_no_text(streams: Streams, include: bool) -> None:
    bang = streams.tokenizer.encode("!")[0]
    options = {"stop_token_ids": (bang,), "include_stop_str_in_output": include}
    streams.open(1, form="completion", **options)
    num_tokens = streams.say(1, "The dog!")
    streams.open(2, form="completion", **options)
    ids = streams.tokenizer.encode("The dog!")
    for i, token_id in enumerate(ids):
        ends = [StreamEnd(2, "stop", i + 1, stop_reason=bang)]
        cached = [(2, 4)] if i == 0 else []
        streams.step([(2, i, token_id)], ends if token_id == bang else [], cached=cached)
        streams.flush()
    assert streams.text(1) == "The dog!"  # not ended by it: ignored
    assert streams.text(2) == ("The dog!" if include else "The dog")
    assert streams.ids(2) == ids
    finish = streams.last(2).finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason) == ("stop", bang)
    assert (finish.num_output_tokens, finish.num_cached_tokens) == (num_tokens, 4)


@pytest.mark.parametrize("form", ["raw", "chat"])
def test_a_gap_ends_that_stream_alone(streams: Streams, form: str) -> None:
    streams.open(1, form=form)
    streams.open(2, form=form)
    a = streams.tokenizer.encode("a")[0]
    streams.step([(1, 0, a), (2, 0, a)])
    streams.step([(1, 2, a), (2, 1, a)])
    streams.flush()
    chunk = streams.last(1)
    assert chunk.finish is not None
    assert chunk.finish.error is not None
    assert (chunk.finish.reason, chunk.finish.num_output_tokens, chunk.data) == ("error", 1, b"")
    assert chunk.finish.error.status == 500
    assert "token 2 arrived after 1 tokens" in chunk.finish.error.message
    assert streams.stops == [StopStream(1, 1)]
    assert streams.text(2) == "aa"
    streams.end(1, "stop", 1)
    streams.end(2, "length", 2)
    assert streams.core.statistics()["streams"] == 0


def test_an_end_that_counts_otherwise_is_an_error(streams: Streams) -> None:
    streams.open(1)
    num_tokens = streams.say(1, "a")
    streams.end(1, "length", num_tokens + 1)
    finish = streams.last(1).finish
    assert finish is not None
    assert finish.error is not None
    assert "ended after 2 tokens, 1 arrived" in finish.error.message


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_abort_and_error_pass_through_without_an_event(streams: Streams, reason: str) -> None:
    error = ErrorInfo("out of luck", 500, "server_error") if reason == "error" else None
    streams.open(1, form="chat", stop=("abc",))
    num_tokens = streams.say(1, "xab")
    streams.end(1, reason, num_tokens, error=error)
    chunk = streams.last(1)
    assert chunk.finish is not None
    assert (chunk.finish.reason, chunk.finish.error, chunk.data) == (reason, error, b"")
    assert chunk.finish.num_output_tokens == num_tokens
    assert streams.text(1) == "xab"


def test_tokens_that_the_library_refuses_cost_one_stream(
    spec: ModelSpec, word_piece: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = token_decoder.LibraryDecoder.feed

    def refuse(self: token_decoder.LibraryDecoder, token_id: int) -> str:
        if token_id == 3:
            raise ValueError("no prefix")
        return feed(self, token_id)

    monkeypatch.setattr(token_decoder.LibraryDecoder, "feed", refuse)
    streams = Streams(spec, word_piece)
    streams.open(1)
    streams.open(2)
    streams.step([(1, 0, 1), (2, 0, 1)])
    streams.step([(1, 1, 3), (2, 1, 4)])
    streams.end(2, "length", 2)
    finish = streams.last(1).finish
    assert finish is not None
    assert finish.error is not None
    assert "token 3 can't be decoded: no prefix" in finish.error.message
    assert streams.text(2) == "the fox"
