"""Logprobs of a stream's tokens and of its prompt, in chunks and in rendered events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from actors.text.streams import Streams

from ringcast.actors.text.logprob_rows import unpack_rows
from ringcast.mq import codec
from ringcast.mq.messages import PromptLogprobs, StopStream, TokenLogprobs


def step_logprobs(rows: dict[int, list[tuple[int, float]]], width: int) -> TokenLogprobs:
    ids = np.full((len(rows), width), -1, np.int32)
    values = np.full((len(rows), width), -np.inf, np.float32)
    for i, row in enumerate(rows.values()):
        ids[i, : len(row)] = [token_id for token_id, _ in row]
        values[i, : len(row)] = [value for _, value in row]
    index, rank = codec.pack(rows), codec.pack([1] * len(rows))
    return TokenLogprobs(width, index, ids.tobytes(), values.tobytes(), rank)


@pytest.mark.parametrize("delta", [True, False])
def test_logprobs(streams: Streams, delta: bool) -> None:
    a, b, c = (streams.tokenizer.encode(letter)[0] for letter in "abc")
    streams.open(1, logprobs=1, form="chat", delta=delta)
    streams.open(2, form="chat", delta=delta)
    streams.open(3, logprobs=0, form="chat", delta=delta)
    for i in range(3):
        rows = {1: [(a, -0.5), (a, -0.5), (b, -1.5)], 2: [(c, -0.25), (c, -0.25), (b, -1.5)]}
        streams.step([(2, i, b), (1, i, a), (3, i, c)], logprobs=step_logprobs(rows, 3))
        if i != 1:
            streams.flush()
    for stream in (1, 2, 3):
        streams.end(stream, "length", 3)

    def rows_of(stream: int) -> list[Any]:
        return [
            (row.place, row.token_ids, row.logprobs, row.texts)
            for chunk in streams.chunks[f"r{stream}"]
            if chunk.logprobs is not None
            for row in unpack_rows(chunk.logprobs, chunk.logprob_tokens, chunk.first_index)
        ]

    assert rows_of(1) == [(i, [a, a], [-0.5, -0.5], [b"a", b"a"]) for i in range(3)]
    assert rows_of(2) == []
    assert rows_of(3) == [(i, [c], [-0.25], [b"c"]) for i in range(3)]
    if delta:
        events = [json.loads(c.data[6:])["choices"][0] for c in streams.chunks["r1"]]
        assert [len(e["logprobs"]["content"]) if e["logprobs"] else 0 for e in events] == [1, 2, 0]


def test_logprobs_of_held_text_are_in_the_next_event(streams: Streams) -> None:
    a, b = streams.tokenizer.encode("a")[0], streams.tokenizer.encode("b")[0]
    streams.open(1, logprobs=0, form="chat", stop=("ac",))
    for i, token_id in enumerate((a, b)):
        streams.step([(1, i, token_id)], logprobs=step_logprobs({0: [(token_id, -0.5)]}, 1))
        streams.flush()
    first, second = streams.chunks["r1"]
    assert first.logprobs is not None
    assert first.data == b""
    content = json.loads(second.data[6:])["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b"]


@pytest.mark.parametrize("delta", [True, False])
def test_tokens_by_their_ids(streams: Streams, delta: bool) -> None:
    a = streams.tokenizer.encode("a")[0]
    streams.open(
        1, logprobs=1, prompt_logprobs=0, form="completion", delta=delta, tokens_as_ids=True
    )
    rows = step_logprobs({0: [(a, -0.5), (70, -0.25)]}, 2)
    streams.step([(1, 0, a)], logprobs=rows, prompt_logprobs=[prompt_part(1, 1, [10])])
    streams.end(1, "length", 1)
    streams.flush()
    first = streams.chunks["r1"][0]
    assert first.text == "a"
    assert first.logprob_tokens == [b"token_id:%d" % a, b"token_id:70"]
    assert first.prompt_logprob_tokens[0] == b"token_id:10"
    if delta:
        (choice,) = json.loads(first.data[6:])["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{a}"]


def prompt_part(stream: int, first: int, ids: Sequence[int]) -> PromptLogprobs:
    rows = {at: [(token_id, -0.5), (token_id + 1, -1.0)] for at, token_id in enumerate(ids)}
    return PromptLogprobs(stream, first, step_logprobs(rows, 2))


@pytest.mark.parametrize("delta", [True, False])
def test_prompt_logprobs(streams: Streams, delta: bool) -> None:
    streams.open(1, prompt_logprobs=1, delta=delta)
    streams.open(2, prompt_logprobs=0, delta=delta)
    streams.step([], prompt_logprobs=[prompt_part(1, 1, [10, 11]), prompt_part(9, 1, [10])])
    streams.flush()
    assert streams.chunks == {}
    # Preempted before its first token: all of it comes again.
    again = [prompt_part(1, 1, [10]), prompt_part(1, 2, [11, 12]), prompt_part(1, 4, [13])]
    streams.step([(1, 0, 70), (2, 0, 70)], prompt_logprobs=[*again, prompt_part(2, 1, [20])])
    streams.flush()
    for stream in (1, 2):
        streams.end(stream, "length", 1)
    first, *rest = streams.chunks["r1"]
    assert first.prompt_logprobs is not None
    assert all(chunk.prompt_logprobs is None for chunk in rest)
    rows = unpack_rows(first.prompt_logprobs, first.prompt_logprob_tokens)
    assert [row.place for row in rows] == [1, 2, 3, 4]
    assert [row.token_ids for row in rows] == [[i, i + 1] for i in (10, 11, 12, 13)]
    other = streams.chunks["r2"][0]
    assert other.prompt_logprobs is not None
    assert [
        row.token_ids for row in unpack_rows(other.prompt_logprobs, other.prompt_logprob_tokens)
    ] == [[20]]


def test_a_gap_in_prompt_logprobs_costs_one_stream(streams: Streams) -> None:
    streams.open(1, prompt_logprobs=1)
    streams.step([], prompt_logprobs=[prompt_part(1, 2, [10])])
    streams.flush()
    finish = streams.last(1).finish
    assert finish is not None
    assert finish.error is not None
    assert "prompt_logprobs from 2 on arrived after 0" in finish.error.message
    assert streams.stops == [StopStream(1, 0)]
