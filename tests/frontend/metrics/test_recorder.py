"""What is counted of a request, and when."""

from __future__ import annotations

from typing import Any

import pytest

from ringcast.frontend.client import EngineClient
from ringcast.frontend.handle import RequestHandle
from ringcast.frontend.metrics.histogram import Histogram
from ringcast.frontend.metrics.recorder import Recorder
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import EngineDeadError
from ringcast.mq.messages import (
    Accepted,
    Chunk,
    Chunks,
    ErrorInfo,
    Finish,
    OutputSpec,
    Rejected,
    TextPrompt,
    Timing,
)
from ringcast.mq.sampling_params import SamplingParams

ENGINE = ["worker.0", "scheduler.0"]


class Desk:
    """A ledger with a recorder, under a clock that stands still until it is moved."""

    def __init__(self, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.client = EngineClient(spec, lambda to, message: None)
        self.client.observer = self.recorder = Recorder()

    def ask(self, delta: bool = True, **params: Any) -> RequestHandle:
        output = OutputSpec(client=0, delta=delta)
        handle = self.client.submit(TextPrompt("hi"), SamplingParams(**params), output)
        self.client.deliver("tokenizer.0", Accepted(handle.request_id, 0, codec.pack([1, 2])))
        return handle

    def chunk(
        self, handle: RequestHandle, num_tokens: int, finish: Finish | None = None, choice: int = 0
    ) -> None:
        first = len(handle.emitted[choice]) // 4
        ids = codec.pack([5] * num_tokens)
        incarnation = handle.request.incarnation
        chunk = Chunk(handle.request_id, incarnation, choice, first, ids, finish=finish)
        self.client.deliver("detokenizer.0", Chunks([chunk]))


@pytest.fixture
def desk(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(spec, monkeypatch)


def seen(histogram: Histogram) -> tuple[int, float]:
    """(how many observations, their sum)"""
    buckets, total = histogram.cumulative()
    return int(buckets[-1][1]), pytest.approx(total)


def test_a_stream(desk: Desk) -> None:
    handle, recorder = desk.ask(max_tokens=5), desk.recorder
    desk.now = 1002.0
    desk.chunk(handle, 1)
    assert seen(recorder.first_token) == (1, 2.0)
    desk.now = 1002.5
    desk.chunk(handle, 1)
    desk.now = 1004.0
    timing = Timing(queued=1000.5, scheduled=1001.0, first_token=1001.75)
    desk.chunk(handle, 1, Finish("length", 2, 3, timing=timing))
    assert seen(recorder.between_tokens) == (2, 2.0)
    assert seen(recorder.queue) == (1, 0.5)
    assert seen(recorder.prefill) == (1, 0.75)
    assert seen(recorder.decode) == (1, 2.25)
    assert seen(recorder.inference) == (1, 3.0)
    assert seen(recorder.per_token) == (1, 1.125)
    assert seen(recorder.end_to_end) == (1, 4.0)
    assert seen(recorder.prompt_tokens) == (1, 2)
    assert seen(recorder.generation_tokens) == (1, 3)
    assert seen(recorder.max_tokens) == (1, 5)
    assert recorder.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert not recorder._last


def test_an_answer_that_is_not_streamed_has_the_schedulers_first_token(desk: Desk) -> None:
    handle, recorder = desk.ask(delta=False), desk.recorder
    desk.now = 1003.0
    desk.chunk(handle, 64)  # a checkpoint, which nobody sees
    desk.now = 1004.0
    desk.chunk(handle, 2, Finish("stop", 2, 66, timing=Timing(1000.0, 1000.5, 1001.0)))
    assert seen(recorder.first_token) == (1, 1.0)
    assert seen(recorder.between_tokens) == (0, 0)


def test_several_choices(desk: Desk) -> None:
    handle, recorder = desk.ask(n=2), desk.recorder
    desk.now = 1001.0
    desk.chunk(handle, 1, choice=1)
    desk.now = 1002.0
    desk.chunk(handle, 1, Finish("stop", 2, 1, timing=Timing(1000.0, 1000.0, 1000.5)))
    desk.now = 1005.0
    timing = Timing(1000.0, 1000.0, 1000.5)
    desk.chunk(handle, 1, Finish("length", 2, 2, timing=timing), choice=1)
    assert seen(recorder.first_token) == (1, 1.0)
    assert seen(recorder.between_tokens) == (1, 4.0)  # of choice 1 alone
    assert seen(recorder.decode) == (2, 1.5 + 4.5)
    assert seen(recorder.generation_tokens) == (2, 3)
    assert seen(recorder.end_to_end) == (1, 5.0)
    assert seen(recorder.n) == (1, 2)
    assert recorder.finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}


def test_an_abort_before_anything_came(desk: Desk) -> None:
    handle, recorder = desk.ask(), desk.recorder
    handle.abort()
    desk.chunk(handle, 0, Finish("abort", 2, 0))
    assert recorder.finished["abort"] == 1
    assert seen(recorder.first_token) == seen(recorder.between_tokens) == (0, 0)
    assert seen(recorder.decode) == (0, 0)


def test_a_takeover_is_a_pause_for_the_user_and_no_time_of_the_engine(desk: Desk) -> None:
    handle, recorder = desk.ask(), desk.recorder
    desk.chunk(handle, 1)
    desk.client.lost(ENGINE, "worker.0 was killed", True)
    desk.client.regained(ENGINE)
    desk.now = 1003.0
    finish = Finish("stop", 2, 2, timing=Timing(1001.0, 1001.0, 1001.0))
    desk.chunk(handle, 1, finish)
    assert seen(recorder.between_tokens) == (1, 3.0)
    assert seen(recorder.end_to_end) == (1, 3.0)
    assert seen(recorder.queue) == seen(recorder.decode) == (0, 0)
    assert recorder.finished["stop"] == 1


def test_duplicates_are_not_counted(desk: Desk) -> None:
    handle = desk.ask()
    desk.chunk(handle, 1)
    duplicate = Chunk(handle.request_id, 0, 0, 0, codec.pack([5]))
    desk.client.deliver("detokenizer.0", Chunks([duplicate]))
    assert seen(desk.recorder.between_tokens) == (0, 0)


def test_what_the_engine_failed_is_an_error_and_a_refusal_is_not(desk: Desk) -> None:
    rejected = desk.client.submit(TextPrompt("hi"), SamplingParams())
    desk.client.deliver("tokenizer.0", Rejected(rejected.request_id, 0, ErrorInfo("too long")))
    assert desk.recorder.finished.total() == 0
    half = desk.ask(n=2)
    desk.chunk(half, 1, Finish("stop", 2, 1))
    failed = desk.ask()
    desk.chunk(failed, 0, Finish("error", 2, 0, error=ErrorInfo("boom", 500)))
    desk.client.fail_all(EngineDeadError("gone"))
    assert desk.recorder.finished == {"stop": 1, "length": 0, "abort": 0, "error": 2}
    assert not desk.recorder._last
