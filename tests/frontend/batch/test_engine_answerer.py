"""Answers of an own engine: as the HTTP server's, to the letter."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from ringcast.frontend.async_llm import AsyncLLM
from ringcast.frontend.batch.endpoints import ENDPOINTS
from ringcast.frontend.batch.engine_answerer import EngineAnswerer
from ringcast.frontend.batch.lines import BatchRequest
from ringcast.mq.errors import EngineDeadError, OverloadedError
from ringcast.mq.messages import ErrorInfo
from ringcast.mq.server_config import ServerConfig

TEXT = "Hello, wörld 🌍!"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
RESPONSE_URL = "/v1/responses"
POOLING_URLS = sorted(ENDPOINTS.keys() - {CHAT_URL, COMPLETION_URL, RESPONSE_URL})


def make(**options: Any) -> EngineAnswerer:
    return EngineAnswerer(AsyncLLM("some-model", **options), ServerConfig())


def ask(url: str, body: Any) -> BatchRequest:
    encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return BatchRequest("a", url, encoded)


async def test_a_chat(connection: Any, engine: Any) -> None:
    async with make() as answerer:
        response = await answerer.answer(ask(CHAT_URL, {**CHAT, "n": 2, "seed": 5}))
    assert response.status_code == 200
    body = msgspec.json.decode(response.body)
    assert body["id"] == f"chatcmpl-{response.request_id}"
    assert (body["object"], body["model"]) == ("chat.completion", "some-model")
    assert [choice["message"]["content"] for choice in body["choices"]] == [TEXT, TEXT]
    assert body["usage"]["completion_tokens"] == 10
    assert engine.generated[0].params.seed == 5
    assert connection.num_closed == 1


async def test_completions_of_several_prompts(connection: Any, engine: Any) -> None:
    async with make() as answerer:
        response = await answerer.answer(ask(COMPLETION_URL, {"prompt": ["a", "b"]}))
    body = msgspec.json.decode(response.body)
    assert [choice["text"] for choice in body["choices"]] == [TEXT, TEXT]
    assert [sent.params.max_tokens for sent in engine.generated] == [16, 16]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT_URL, {"messages": "hi"}),
        (CHAT_URL, {**CHAT, "temperature": -1}),
        (CHAT_URL, {**CHAT, "nonsense": 1}),
        (CHAT_URL, {**CHAT, "best_of": 3}),
        (CHAT_URL, {**CHAT, "max_tokens": 1, "max_completion_tokens": 2}),
        (COMPLETION_URL, {}),
        (COMPLETION_URL, {"prompt": [1, 1000]}),
        (COMPLETION_URL, {"prompt": "a", "priority": 3}),
        (COMPLETION_URL, [1]),
        (COMPLETION_URL, b'{"prompt": "\xff"}'),
        (RESPONSE_URL, {}),
        (RESPONSE_URL, {"input": []}),
        (RESPONSE_URL, {"input": "hi", "max_output_tokens": 0}),
        (RESPONSE_URL, {"input": "hi", "previous_response_id": "resp_1"}),
        *((url, {"input": "hi"}) for url in POOLING_URLS),  # not by a model that generates
    ],
)
async def test_what_the_server_refuses_is_refused_in_its_words(
    connection: Any, serve: Any, engine: Any, url: str, body: Any
) -> None:
    asked = ask(url, body)
    async with serve() as server, server.http.post(url, data=asked.body) as answer:
        status, said = answer.status, await answer.read()
    async with EngineAnswerer(AsyncLLM("fake-model"), ServerConfig()) as answerer:
        response = await answerer.answer(asked)
    assert status == 400
    assert (response.status_code, bytes(response.body)) == (status, said)
    assert engine.generated == []


async def test_a_response(connection: Any, serve: Any, engine: Any) -> None:
    engine.words = ["<think>", "Hm", "</think>", *engine.words]
    body = {"input": "hi", "instructions": "Be kind.", "metadata": {"a": "b"}, "seed": 5}
    server = ServerConfig(reasoning_parser="qwen3")
    async with serve(reasoning_parser="qwen3") as by_http:
        answer = await by_http.http.post(RESPONSE_URL, json={**body, "model": "fake-model"})
        wanted = await answer.json()
    async with EngineAnswerer(AsyncLLM("some-model"), server) as answerer:
        response = await answerer.answer(ask(RESPONSE_URL, body))
    assert response.status_code == 200
    said = msgspec.json.decode(response.body)
    assert said["id"] == f"resp_{response.request_id}"
    assert [item["type"] for item in said["output"]] == ["reasoning", "message"]
    assert said["output"][1]["content"][0]["text"] == TEXT
    assert said["usage"] == wanted["usage"]
    assert said.keys() == wanted.keys()
    assert [sent.params.seed for sent in engine.generated] == [5, 5]


async def test_names_of_the_model(connection: Any) -> None:
    server = ServerConfig(served_model_name=["gpt", "other"])
    async with EngineAnswerer(AsyncLLM("some-model"), server) as answerer:
        for given, used in ((None, "gpt"), ("gpt", "gpt"), ("other", "other")):
            response = await answerer.answer(ask(CHAT_URL, {**CHAT, "model": given}))
            assert msgspec.json.decode(response.body)["model"] == used
        response = await answerer.answer(ask(CHAT_URL, {**CHAT, "model": "some-model"}))
    error = msgspec.json.decode(response.body)["error"]
    assert (response.status_code, error["param"]) == (404, "model")
    assert "gpt, other (--served-model-name" in error["message"]


async def test_failures_in_the_engine(connection: Any, engine: Any) -> None:
    async with make() as answerer:
        engine.reject = ErrorInfo("too long: 600 > 512")
        response = await answerer.answer(ask(CHAT_URL, CHAT))
        assert response.status_code == 400
        assert "too long" in msgspec.json.decode(response.body)["error"]["message"]
        engine.reject, engine.fail = None, ErrorInfo("the worker stumbled", 500)
        response = await answerer.answer(ask(CHAT_URL, CHAT))
        assert response.status_code == 500
        assert "stumbled" in msgspec.json.decode(response.body)["error"]["message"]


async def test_a_bug_is_one_requests_failure(
    connection: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("ringcast.frontend.http.generation.Generation.answer", broken)
    async with make() as answerer:
        response = await answerer.answer(ask(CHAT_URL, CHAT))
    assert response.status_code == 500
    message = msgspec.json.decode(response.body)["error"]["message"]
    assert message == "ZeroDivisionError: by zero"
    assert "custom_id 'a'" in caplog.text


async def test_a_full_engine_is_asked_later_and_a_dead_one_never(
    connection: Any, engine: Any, until: Any
) -> None:
    engine.hold = 0
    async with make(max_num_queued_reqs=2) as answerer:
        waiting = asyncio.create_task(answerer.answer(ask(CHAT_URL, CHAT)))
        await until(lambda: len(engine.generated) == 1)
        with pytest.raises(OverloadedError):
            await answerer.answer(ask(COMPLETION_URL, {"prompt": ["a", "b"]}))
        engine.die(EngineDeadError("worker.0 died"))
        with pytest.raises(EngineDeadError):
            await waiting
        with pytest.raises(EngineDeadError):
            await answerer.answer(ask(CHAT_URL, CHAT))


async def test_cancelling_aborts(connection: Any, engine: Any, until: Any) -> None:
    engine.hold = 1
    async with make() as answerer:
        waiting = asyncio.create_task(answerer.answer(ask(CHAT_URL, CHAT)))
        await until(lambda: len(engine.generated) == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert engine.aborted == [engine.generated[0].request_id]
