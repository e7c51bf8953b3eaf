"""What is in a request's span, and whose trace it is in."""

from __future__ import annotations

from typing import Any

import pytest

from ringcast.frontend.client import EngineClient
from ringcast.frontend.http import trace_context
from ringcast.frontend.metrics.recorder import Recorder
from ringcast.frontend.metrics.request_spans import RequestSpan, RequestSpans
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec, build
from ringcast.mq.errors import ConfigError, EngineDeadError
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
from ringcast.mq.server_config import ServerConfig

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Desk:
    """A ledger under a clock that stands still until it is moved, and the spans of its requests."""

    def __init__(self, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.time_ns", lambda: round((self.now + 5000) * 1e9))
        self.client = EngineClient(spec, lambda to, message: None)
        self.spans: list[RequestSpan] = []
        self.recorder = Recorder()
        self.client.observer = RequestSpans(self.recorder, lambda: {"a": "b"}, self.spans.append)

    def ask(self, **params: Any) -> Any:
        output = OutputSpec(client=0, delta=True, response_id="cmpl-1", model="m")
        handle = self.client.submit(TextPrompt("hi"), SamplingParams(**params), output)
        self.client.deliver("tokenizer.0", Accepted(handle.request_id, 0, codec.pack([1, 2])))
        return handle

    def end(self, handle: Any, finish: Finish, choice: int = 0) -> None:
        ids = codec.pack([5, 6, 7])
        chunk = Chunk(handle.request_id, 0, choice, 0, ids, finish=finish)
        self.client.deliver("detokenizer.0", Chunks([chunk]))


@pytest.fixture
def desk(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(spec, monkeypatch)


def test_attributes(desk: Desk) -> None:
    handle = desk.ask(temperature=0.5, top_p=0.9, max_tokens=3)
    desk.now = 1004.0
    timing = Timing(queued=1000.5, scheduled=1001.0, first_token=1002.0)
    desk.end(handle, Finish("length", 2, 3, timing=timing))
    (span,) = desk.spans
    assert (span.start, span.end) == (6000 * 10**9, 6004 * 10**9)
    assert (span.context, span.error) == ({"a": "b"}, "")
    assert span.attributes == {
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 2.0,
        "gen_ai.latency.time_in_model_prefill": 1.0,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 3.0,
        "gen_ai.latency.e2e": 4.0,
    }
    assert desk.recorder.finished["length"] == 1


def test_a_span_for_all_choices(desk: Desk) -> None:
    handle = desk.ask(n=2)
    desk.end(handle, Finish("stop", 2, 3), choice=1)
    assert desk.spans == []
    desk.end(handle, Finish("length", 2, 3), choice=0)
    attributes = desk.spans[0].attributes
    assert attributes["gen_ai.usage.num_sequences"] == 2
    assert attributes["gen_ai.usage.completion_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "stop"]


def test_how_it_went_wrong(desk: Desk) -> None:
    refused = desk.client.submit(TextPrompt("hi"), SamplingParams())
    error = ErrorInfo("too long")
    desk.client.deliver("tokenizer.0", Rejected(refused.request_id, 0, error))
    failed = desk.ask()
    desk.end(failed, Finish("error", 2, 3, error=ErrorInfo("broken", status=500)))
    desk.ask()
    desk.client.fail_all(EngineDeadError("gone"))
    assert [span.error for span in desk.spans] == [
        "refused by the tokenizer, or ended before it was accepted",
        "broken",
        "ended with its engine",
    ]
    assert desk.spans[0].attributes["gen_ai.request.id"] == refused.request_id
    assert "gen_ai.latency.time_in_queue" not in desk.spans[2].attributes


async def test_each_request_has_the_context_of_its_own_client(serve: Any, client: Any) -> None:
    spans: list[RequestSpan] = []
    async with serve(otlp_traces_endpoint="http://localhost:1/v1/traces") as server:
        client.observer = RequestSpans(client.observer, trace_context.current, spans.append)
        headers = {"traceparent": PARENT, "tracestate": "x=y", "X-Request-Id": "mine"}
        for sent in (headers, {}):
            path = "/v1/chat/completions"
            async with server.http.post(path, json=CHAT, headers=sent) as answer:
                assert answer.status == 200
    assert spans[0].context == {"traceparent": PARENT, "tracestate": "x=y"}
    assert spans[0].attributes["gen_ai.request.id"] == "chatcmpl-mine"
    assert spans[0].attributes["gen_ai.response.model"] == "fake-model"
    assert spans[1].context == {}


@pytest.mark.parametrize(
    "url", ["localhost:4317", "grpc://localhost:4317", "http://localhost:4317", "http:///v1/traces"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint = .*localhost:4318/v1/traces"):
        build(ServerConfig, {"otlp_traces_endpoint": url})
