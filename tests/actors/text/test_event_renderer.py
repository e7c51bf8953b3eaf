"""The bytes of a stream's events, as OpenAI's clients read them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ringcast.actors.text.event_renderer import EventRenderer
from ringcast.actors.text.logprob_rows import LogprobRow, pack_rows, unpack_rows
from ringcast.mq.messages import Finish, OpenStream, OutputSpec
from ringcast.mq.sampling_params import SamplingParams


def renderer(form: str, null_usage: bool = False, choice: int = 1) -> EventRenderer:
    output = OutputSpec(
        client=0,
        form=form,
        delta=True,
        response_id='id-"1"',
        model="tiny/ü",
        created=17,
        index_offset=3,
        null_usage=null_usage,
    )
    return EventRenderer(OpenStream(5, "r", 0, choice, 7, SamplingParams(), output))


def parse(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    value: dict[str, Any] = json.loads(event[6:])
    return value


def test_chat_events() -> None:
    events = renderer("chat")
    head = {
        "id": 'id-"1"',
        "object": "chat.completion.chunk",
        "created": 17,
        "model": "tiny/ü",
    }
    choice = {"index": 4, "logprobs": None, "finish_reason": None}
    first = parse(events.event('a"\n', [], None))
    assert first == head | {
        "choices": [choice | {"delta": {"role": "assistant", "content": 'a"\n'}}]
    }
    second = parse(events.event("é🦊\u2028", [], None))
    assert second == head | {"choices": [choice | {"delta": {"content": "é🦊\u2028"}}]}
    last = parse(events.event("", [], Finish("stop", 7, 3, stop_reason="</x>")))
    end = {"finish_reason": "stop", "stop_reason": "</x>", "delta": {"content": ""}}
    assert last == head | {"choices": [choice | end]}


def test_completion_events() -> None:
    events = renderer("completion", null_usage=True)
    head = {
        "id": 'id-"1"',
        "object": "text_completion",
        "created": 17,
        "model": "tiny/ü",
        "usage": None,
    }
    choice = {"index": 4, "logprobs": None, "finish_reason": None}
    assert parse(events.event("hi", [], None)) == head | {"choices": [choice | {"text": "hi"}]}
    last = parse(events.event("!", [], Finish("length", 7, 3)))
    end = {"finish_reason": "length", "stop_reason": None, "text": "!"}
    assert last == head | {"choices": [choice | end]}


def test_a_stream_that_is_resumed_has_begun() -> None:
    events = renderer("chat")
    events.resume(12)
    first = parse(events.event("a", [], None))
    assert first["choices"][0]["delta"] == {"content": "a"}
    events = renderer("completion")
    events.resume(12)
    logprobs = parse(events.event("a bc", ROWS, None))["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [12, 13]


@pytest.mark.parametrize("form", ["chat", "completion"])
def test_null_usage_is_in_every_event(form: str) -> None:
    events = renderer(form, null_usage=True)
    for finish in (None, None, Finish("stop", 1, 1, stop_reason=9)):
        assert parse(events.event("x", [], finish))["usage"] is None
    assert "usage" not in parse(renderer(form).event("x", [], None))


ROWS = [
    LogprobRow(0, 1, [10, 10, 11], [-0.5, -0.5, -math.inf], [b"a", b"a", b"\xe4"]),
    LogprobRow(1, 4, [12, 13, -1], [-2.0, -0.25, -math.inf], [b" bc", b"d", None]),
]


def test_chat_logprobs() -> None:
    events = renderer("chat")
    logprobs = parse(events.event("a", ROWS, None))["choices"][0]["logprobs"]
    assert logprobs == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "\ufffd", "logprob": -9999.0, "bytes": [228]},
                ],
            },
            {
                "token": " bc",
                "logprob": -2.0,
                "bytes": [32, 98, 99],
                "top_logprobs": [{"token": "d", "logprob": -0.25, "bytes": [100]}],
            },
        ]
    }


def test_completion_logprobs_count_offsets_over_events() -> None:
    events = renderer("completion")
    first = parse(events.event("a bc", ROWS, None))["choices"][0]["logprobs"]
    assert first == {
        "tokens": ["a", " bc"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"a": -0.5, "\ufffd": -9999.0}, {" bc": -2.0, "d": -0.25}],
        "text_offset": [0, 1],
    }
    second = parse(events.event("a", ROWS[:1], None))["choices"][0]["logprobs"]
    assert second["text_offset"] == [4]


def test_rows_survive_the_wire() -> None:
    packed, texts = pack_rows(ROWS, first_place=0)
    assert unpack_rows(packed, texts) == ROWS
    narrow = LogprobRow(7, 2, [3], [-1.0], [b"x"])
    packed, texts = pack_rows([ROWS[0]._replace(place=6), narrow], first_place=6)
    assert packed.width == 3
    wide = narrow._replace(
        token_ids=[3, -1, -1], logprobs=[-1.0, -math.inf, -math.inf], texts=[b"x", None, None]
    )
    assert unpack_rows(packed, texts, first_place=6) == [ROWS[0]._replace(place=6), wide]
