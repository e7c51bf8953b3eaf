"""Streams of tokens become chunks: text, ids, counts, rendered events."""

from __future__ import annotations

import json

import pytest
from actors.text.streams import Streams
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcast.actors.core import PeerLost, Send
from ringcast.actors.text.text_tokenizer import TextTokenizer
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.messages import Message, Ping, ResetPrefixCache, StreamEnd


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
    streams = Streams(spec, byte_level)
    ids = {stream: byte_level.encode(text) for stream, text in enumerate(texts)}
    todo = {stream: list(enumerate(tokens)) for stream, tokens in ids.items()}
    for stream in todo:
        streams.open(stream, client=stream % 2, delta=delta, form="chat")
    rest = [stream for stream, pairs in todo.items() for _ in pairs]
    for stream in moves + rest:
        if todo.get(stream):
            entry = (stream, *todo[stream].pop(0))
            ends = [] if todo[stream] else [StreamEnd(stream, "length", len(ids[stream]))]
            streams.step([entry], [] if end_late else ends)
            if end_late and ends:
                streams.step([], ends)
        elif stream not in todo:
            streams.flush()
    streams.flush()
    for stream, text in enumerate(texts):
        assert streams.text(stream) == text
        assert streams.ids(stream) == ids[stream]
        finish = streams.last(stream).finish
        assert finish is not None
        assert (finish.reason, finish.num_output_tokens) == ("length", len(ids[stream]))
        events = [chunk.data for chunk in streams.chunks[f"r{stream}"]]
        assert delta or events == [b""]
        contents = [json.loads(e[6:])["choices"][0]["delta"]["content"] for e in events if e]
        assert not delta or "".join(contents) == text
    assert streams.core.statistics()["streams"] == 0


def test_a_flush_is_one_message_for_each_client(streams: Streams) -> None:
    for stream in range(4):
        streams.open(stream, client=stream // 2, incarnation=2)
    a, b = streams.tokenizer.encode("a") + streams.tokenizer.encode("b")
    streams.step([(stream, 0, a) for stream in range(4)])
    streams.step([(stream, 1, b) for stream in range(4)])
    sends = list(streams.core.flush(0.0))
    assert [(send.to, len(send.message.chunks)) for send in sends] == [
        ("client.0", 2),
        ("client.1", 2),
    ]
    chunk = sends[0].message.chunks[0]
    assert (chunk.request_id, chunk.incarnation, chunk.text) == ("r0", 2, "ab")
    assert list(streams.core.flush(0.0)) == []
    assert streams.core.statistics() == {"streams": 4, "tokens": 8, "chunks": 4, "dropped": 0}


def test_ids_are_sent_though_no_text_is_ready(streams: Streams) -> None:
    streams.open(1, form="chat")
    first, *rest = streams.tokenizer.encode("🦊")
    streams.step([(1, 0, first)])
    streams.flush()
    assert streams.ids(1) == [first]
    assert (streams.last(1).text, streams.last(1).data) == ("", b"")
    streams.step([(1, i + 1, token_id) for i, token_id in enumerate(rest)])
    streams.flush()
    assert streams.text(1) == "🦊"
    assert b'"role":"assistant"' in streams.last(1).data


def test_special_tokens(streams: Streams) -> None:
    ids = streams.tokenizer.encode("a<s>b<tool>")
    for stream, skip in enumerate((True, False)):
        streams.open(stream, skip_special_tokens=skip)
        streams.step([(stream, i, token_id) for i, token_id in enumerate(ids)])
    streams.flush()
    assert (streams.text(0), streams.text(1)) == ("ab<tool>", "a<s>b<tool>")


def test_duplicates_are_dropped(streams: Streams) -> None:
    streams.open(1)
    a, b = streams.tokenizer.encode("a")[0], streams.tokenizer.encode("b")[0]
    streams.step([(1, 0, a), (1, 0, a), (1, 1, b)])
    streams.step([(1, 0, a), (1, 1, b), (1, 2, a)])
    streams.step([(9, 0, a)], [StreamEnd(8, "stop", 1)])
    streams.flush()
    assert (streams.text(1), streams.ids(1)) == ("aba", [a, b, a])
    assert streams.core.statistics()["dropped"] == 5


def test_whole_choices_are_one_chunk(streams: Streams) -> None:
    for choice in range(2):
        streams.open(choice, choice=choice, form="chat", delta=False)
        num_tokens = streams.say(choice, "The dog")
        assert streams.chunks.get(f"r{choice}") is None
        streams.end(choice, "length", num_tokens)
        (chunk,) = streams.chunks[f"r{choice}"]
        assert (chunk.choice, chunk.text, chunk.data) == (choice, "The dog", b"")
        assert codec.ints(chunk.token_ids).tolist() == streams.tokenizer.encode("The dog")


def chunk_sizes(streams: Streams, stream: int) -> list[int]:
    return [len(chunk.token_ids) // 4 for chunk in streams.chunks[f"r{stream}"]]


def test_whole_choices_send_a_checkpoint_now_and_then(streams: Streams) -> None:
    ids = streams.tokenizer.encode("The dog sleeps. " * 40)[:150]
    streams.open(1, delta=False)
    streams.open(2, delta=False, incarnation=1)
    streams.open(3, delta=False)
    for i, token_id in enumerate(ids):
        streams.step([(1, i, token_id), (2, i, token_id), (3, i, token_id)])
        if i not in (62, 63, 64):
            streams.flush()
    streams.end(1, "length", 150)
    streams.end(2, "length", 150)
    assert chunk_sizes(streams, 1) == [66, 64, 20]
    assert chunk_sizes(streams, 2) == [*[8] * 7, 10, *[8] * 10, 4]
    assert chunk_sizes(streams, 3) == [66, 64]
    for stream in (1, 2):
        assert streams.ids(stream) == ids
        assert streams.text(stream) == streams.tokenizer.decode(ids)


def test_a_lost_scheduler_s_streams_are_forgotten(streams: Streams) -> None:
    streams.open(1)
    streams.open(2, stop=("d",))
    streams.say(1, "The ")
    streams.step([(1, 9, 0), (2, 0, streams.tokenizer.encode("d")[0])])  # a gap, and a stop string
    for name in ("client.0", "tokenizer.0"):
        assert list(streams.core.handle(name, PeerLost(), 0.0)) == []
    assert streams.core.statistics()["streams"] == 2
    assert list(streams.core.handle("scheduler.0", PeerLost(), 0.0)) == []
    assert list(streams.core.flush(0.0)) == []
    statistics = streams.core.statistics()
    assert statistics["streams"] == 0
    streams.step([(1, 1, 0)], [StreamEnd(1, "length", 2)], cached=[(2, 4)])
    streams.flush()
    assert streams.core.statistics()["dropped"] == statistics["dropped"] + 2
    streams.open(2)  # the next scheduler counts from 0 again
    streams.say(2, "dog")
    assert streams.text(2) == "dog"


@pytest.mark.parametrize("message", [Ping(3, 8), ResetPrefixCache(3, "x")])
def test_what_passes_through_goes_to_its_client(streams: Streams, message: Message) -> None:
    assert list(streams.core.handle("scheduler.0", message, 0.0)) == [Send("client.3", message)]


def test_usage_so_far_counts_tokens_without_text(streams: Streams) -> None:
    streams.open(1, form="chat", continuous_usage=True, stop=("ac",))
    a, b = (streams.tokenizer.encode(letter)[0] for letter in "ab")
    for i, token_id in enumerate((a, b)):
        streams.step([(1, i, token_id)])
        streams.flush()
    streams.end(1, "length", 2)
    streams.flush()
    usages = [json.loads(c.data[6:])["usage"] for c in streams.chunks["r1"] if c.data]
    expected = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert usages == [expected, expected]


@pytest.mark.parametrize("delta", [True, False])
def test_no_text_without_detokenize(streams: Streams, delta: bool) -> None:
    streams.open(1, detokenize=False, include_stop_str_in_output=True, delta=delta)
    count = streams.say(1, "The dog")
    streams.flush()
    streams.end(1, "length", count)
    assert streams.text(1) == ""
    ids = [i for chunk in streams.chunks["r1"] for i in codec.ints(chunk.token_ids).tolist()]
    assert ids == streams.tokenizer.encode("The dog")
