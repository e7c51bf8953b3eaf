"""Tokenizer and detokenizer in front of and behind several replicas."""

from __future__ import annotations

from typing import Any

import pytest
from actors.text.streams import packed_streams

from ringcast.actors.core import PeerLost, Send
from ringcast.actors.text.detokenizer_core import DetokenizerCore
from ringcast.actors.text.text_tokenizer import TextTokenizer
from ringcast.actors.text.tokenizer_core import TokenizerCore
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.messages import (
    Abort,
    AbortClient,
    AbortRequest,
    Generate,
    OpenStream,
    OutputSpec,
    Ping,
    ResetPrefixCache,
    StopStream,
    StreamEnd,
    StreamStep,
    TextPrompt,
)
from ringcast.mq.sampling_params import SamplingParams

ONE, TWO = "scheduler.0", "scheduler.1"


@pytest.fixture
def front(spec: ModelSpec, byte_level: TextTokenizer) -> TokenizerCore:
    return TokenizerCore(spec, byte_level, num_engines=2)


@pytest.fixture
def back(spec: ModelSpec, byte_level: TextTokenizer) -> DetokenizerCore:
    return DetokenizerCore(spec, byte_level)


def test_a_request_goes_to_the_replica_that_its_client_names(front: TokenizerCore) -> None:
    request = Generate("r", 0, TextPrompt("hi"), SamplingParams(), OutputSpec(0), 0.0, engine=1)
    assert [send.to for send in front.handle("client.0", request, 0.0)] == ["client.0", TWO]
    (send,) = front.handle("client.0", Abort("r", 0, engine=1), 0.0)
    assert send == (TWO, AbortRequest("r", 0))


@pytest.mark.parametrize("message", [Ping(0, 1, engine=1), ResetPrefixCache(0, "x", engine=1)])
def test_so_does_what_asks_a_replica(front: TokenizerCore, message: Any) -> None:
    assert list(front.handle("client.0", message, 0.0)) == [Send(TWO, message)]


def test_every_replica_hears_of_a_lost_client(front: TokenizerCore) -> None:
    sends = list(front.handle("client.3", PeerLost(), 0.0))
    assert sends == [Send(ONE, AbortClient(3)), Send(TWO, AbortClient(3))]
    assert list(front.handle(ONE, PeerLost(), 0.0)) == []


def opened(request: str, **params: Any) -> OpenStream:
    """All have the same number."""
    return OpenStream(0, request, 0, 0, 1, SamplingParams(**params), OutputSpec(0, delta=True))


def step(back: DetokenizerCore, scheduler: str, token: int, *ends: StreamEnd) -> None:
    message = StreamStep(packed_streams([0]), codec.pack([0]), codec.pack([token]), list(ends))
    back.handle(scheduler, message, 0.0)


def said(sends: list[Send]) -> dict[str, str]:
    return {chunk.request_id: chunk.text for send in sends for chunk in send.message.chunks}


def test_streams_of_the_same_number_are_told_apart(
    back: DetokenizerCore, byte_level: TextTokenizer
) -> None:
    (a,), (b,) = byte_level.encode("a"), byte_level.encode("b")
    back.handle(ONE, opened("one"), 0.0)
    back.handle(TWO, opened("two"), 0.0)
    step(back, ONE, a)
    step(back, TWO, b, StreamEnd(0, "length", 1))
    assert said(list(back.flush(0.0))) == {"one": "a", "two": "b"}
    assert back.statistics()["streams"] == 1


def test_a_stop_string_is_told_to_its_own_scheduler(
    back: DetokenizerCore, byte_level: TextTokenizer
) -> None:
    (b,) = byte_level.encode("b")
    back.handle(ONE, opened("one"), 0.0)
    back.handle(TWO, opened("two", stop=("b",)), 0.0)
    step(back, ONE, b)
    step(back, TWO, b)
    stops = [send for send in back.flush(0.0) if isinstance(send.message, StopStream)]
    assert stops == [Send(TWO, StopStream(0, 1))]


def test_the_death_of_one_leaves_the_streams_of_the_other(
    back: DetokenizerCore, byte_level: TextTokenizer
) -> None:
    (a,) = byte_level.encode("a")
    back.handle(ONE, opened("one"), 0.0)
    back.handle(TWO, opened("two"), 0.0)
    step(back, ONE, a)
    step(back, TWO, a)
    back.handle(ONE, PeerLost(), 0.0)
    assert said(list(back.flush(0.0))) == {"two": "a"}
    assert back.statistics()["streams"] == 1
    back.handle(ONE, opened("three"), 0.0)  # the next scheduler counts from 0 again
    assert back.statistics()["streams"] == 2
