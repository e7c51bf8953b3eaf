"""The openai client against the server, as users run it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from ringcast.mq.messages import ErrorInfo

TEXT = "Hello, wörld 🌍!"


def connect(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


async def test_chat(serve: Any) -> None:
    async with serve() as server, connect(server) as api:
        answer = await api.chat.completions.create(
            model="fake-model",
            messages=[{"role": "user", "content": "hi"}],
            logprobs=True,
            top_logprobs=1,
            user="me",
        )
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 12
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.content is not None
        assert answer.choices[0].logprobs.content[0].token == "Hello"
        # A reply goes back as history, null fields and all.
        again = await api.chat.completions.create(
            model="fake-model",
            messages=[
                {"role": "user", "content": "hi"},
                answer.choices[0].message.model_dump(),  # type: ignore[list-item]
                {"role": "user", "content": [{"type": "text", "text": "and?"}]},
            ],
        )
        assert again.choices[0].message.content == TEXT


async def test_chat_stream(serve: Any) -> None:
    async with serve() as server, connect(server) as api:
        stream = await api.chat.completions.create(
            model="fake-model",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


async def test_completions(serve: Any) -> None:
    async with serve() as server, connect(server) as api:
        answer = await api.completions.create(model="fake-model", prompt=["a", "b"], logprobs=2)
        assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
        stream = await api.completions.create(model="fake-model", prompt="a", stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == TEXT


async def test_models(serve: Any) -> None:
    async with serve() as server, connect(server) as api:
        assert [model.id async for model in api.models.list()] == ["fake-model"]
        assert (await api.models.retrieve("fake-model")).owned_by == "ringcast"
        with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
            await api.models.retrieve("other")


async def test_errors(serve: Any, engine: Any) -> None:
    async with serve() as server, connect(server) as api:
        with pytest.raises(openai.BadRequestError, match="temperature must be") as caught:
            await api.completions.create(model="fake-model", prompt="a", temperature=-1)
        assert caught.value.param == "temperature"
        engine.fail = ErrorInfo("the worker stumbled", 500)
        stream = await api.completions.create(model="fake-model", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="the worker stumbled"):
            _ = [chunk async for chunk in stream]
