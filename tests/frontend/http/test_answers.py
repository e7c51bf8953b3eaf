"""What the endpoints answer when all goes well."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from ringcast import __version__
from ringcast.frontend.client import EngineClient
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.messages import ChatPrompt, TextPrompt, TokensPrompt

TEXT = "Hello, wörld 🌍!"
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 0},
}
MESSAGES = [{"role": "user", "content": "hi"}]


async def post(server: Any, path: str, body: Any, **options: Any) -> tuple[int, Any]:
    async with server.http.post(path, json=body, **options) as answer:
        return answer.status, await answer.json()


async def events(server: Any, path: str, body: Any) -> list[Any]:
    """The events of a stream, without the last, which must be [DONE]."""
    async with server.http.post(path, json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        *lines, done, end = (await answer.text()).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_small_endpoints(serve: Any) -> None:
    async with serve(served_model_name=["small", "org/small"]) as server:
        async with server.http.get("/health") as answer:
            assert (answer.status, await answer.text()) == (200, "")
        async with server.http.get("/version") as answer:
            assert await answer.json() == {"version": __version__}
        async with server.http.get("/v1/models") as answer:
            models = (await answer.json())["data"]
        assert [model["id"] for model in models] == ["small", "org/small"]
        assert models[0]["max_model_len"] == 512
        async with server.http.get("/v1/models/org/small") as answer:
            assert await answer.json() == models[1]


async def test_status_is_json_with_names(serve: Any) -> None:
    async with serve() as server, server.http.get("/status") as answer:
        status = await answer.json()
    assert status["actors"][0]["name"] == "worker.0"
    assert status["actors"][0]["pid"] == 17
    assert status["edges"][0]["used"] == 10
    assert status["statistics"] == {"num_running": 2.0}


async def test_chat(serve: Any, engine: Any) -> None:
    engine.num_cached_tokens = 4
    async with serve() as server:
        status, answer = await post(server, "/v1/chat/completions", {"messages": MESSAGES})
    assert status == 200
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "fake-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}},
    }
    (sent,) = engine.generated
    assert isinstance(sent.prompt, ChatPrompt)
    assert msgspec.json.decode(sent.prompt.messages) == MESSAGES
    assert sent.prompt.add_generation_prompt
    assert (sent.output.form, sent.output.delta) == ("raw", False)
    assert sent.params.max_tokens is None


async def test_completion(serve: Any, engine: Any) -> None:
    body = {"model": "fake-model", "prompt": "hi", "max_tokens": 2}
    async with serve() as server:
        status, answer = await post(server, "/v1/completions", body)
    assert status == 200
    assert answer.pop("id").startswith("cmpl-")
    del answer["created"]
    assert answer == {
        "object": "text_completion",
        "model": "fake-model",
        "choices": [
            {
                "index": 0,
                "text": "Hello,",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {**USAGE, "completion_tokens": 2, "total_tokens": 9},
    }
    assert engine.generated[0].prompt == TextPrompt("hi")


async def test_chat_stream(serve: Any, engine: Any) -> None:
    async with serve() as server:
        got = await events(server, "/v1/chat/completions", {"messages": MESSAGES})
    deltas = [event["choices"][0]["delta"] for event in got]
    assert deltas[0] == {"role": "assistant", "content": "Hello"}
    assert "".join(delta["content"] for delta in deltas) == TEXT
    assert [event["choices"][0]["finish_reason"] for event in got] == [None] * 5 + ["stop"]
    assert {event["object"] for event in got} == {"chat.completion.chunk"}
    assert len({event["id"] for event in got}) == 1
    assert not any("usage" in event for event in got)


async def test_completion_stream_with_usage(serve: Any) -> None:
    body = {"prompt": "hi", "stream_options": {"include_usage": True}}
    async with serve() as server:
        *got, last = await events(server, "/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in got) == TEXT
    assert [event["usage"] for event in got] == [None] * 6
    assert (last["choices"], last["usage"]) == ([], USAGE)
    assert {key: last[key] for key in ("id", "object", "model", "created")} == {
        key: got[0][key] for key in ("id", "object", "model", "created")
    }


async def test_chat_stream_usage_is_of_all_choices(serve: Any) -> None:
    body = {"messages": MESSAGES, "n": 3, "stream_options": {"include_usage": True}}
    async with serve() as server:
        *got, last = await events(server, "/v1/chat/completions", body)
    assert {event["choices"][0]["index"] for event in got} == {0, 1, 2}
    assert last["object"] == "chat.completion.chunk"
    assert last["usage"] == {**USAGE, "completion_tokens": 15, "total_tokens": 22}


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_with_several_choices(serve: Any, engine: Any, stream: bool) -> None:
    body = {"prompt": [[1, 2], [3]], "n": 2}
    async with serve() as server:
        if stream:
            options = {"include_usage": True}
            *got, last = await events(server, "/v1/completions", body | {"stream_options": options})
            usage = last["usage"]
            texts = dict.fromkeys(range(4), "")
            for event in got:
                texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        else:
            _, answer = await post(server, "/v1/completions", body)
            usage = answer["usage"]
            texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
            assert list(texts) == [0, 1, 2, 3]
    assert texts == dict.fromkeys(range(4), TEXT)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (14, 20)
    assert [sent.output.index_offset for sent in engine.generated] == [0, 2]
    assert engine.generated[0].prompt == TokensPrompt(codec.pack([1, 2]))


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([5, 999], [TokensPrompt(codec.pack([5, 999]))]),
        ([[0]], [TokensPrompt(codec.pack([0]))]),
    ],
)
async def test_forms_of_prompts(serve: Any, engine: Any, prompt: Any, sent: Any) -> None:
    async with serve() as server:
        status, _ = await post(server, "/v1/completions", {"prompt": prompt})
    assert status == 200
    assert [request.prompt for request in engine.generated] == sent


async def test_chat_logprobs(serve: Any) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    expected = {
        "token": "Hello",
        "logprob": -0.5,
        "bytes": list(b"Hello"),
        "top_logprobs": [
            {"token": "t0", "logprob": -1.0, "bytes": list(b"t0")},
            {"token": "t1", "logprob": -2.0, "bytes": list(b"t1")},
        ],
    }
    async with serve() as server:
        _, answer = await post(server, "/v1/chat/completions", body)
        streamed = await events(server, "/v1/chat/completions", body)
    assert answer["choices"][0]["logprobs"]["content"] == [expected]
    assert streamed[0]["choices"][0]["logprobs"]["content"] == [expected]


async def test_completion_logprobs(serve: Any) -> None:
    body = {"prompt": "hi", "logprobs": 1, "max_tokens": 3}
    async with serve() as server:
        _, answer = await post(server, "/v1/completions", body)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["Hello", ",", " wörld"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"t0": -1.0, word: -0.5} for word in ("Hello", ",", " wörld")],
        "text_offset": [0, 5, 6],
    }


async def test_defaults_are_the_requests_then_the_models_then_openais(
    serve: Any, spec: ModelSpec, engine: Any
) -> None:
    chat = "/v1/chat/completions"
    async with serve() as server:
        await post(server, "/v1/completions", {"prompt": "hi"})
        spec.sampling_defaults.update(temperature=0.2, top_k=20)
        await post(server, chat, {"messages": MESSAGES, "top_k": None})
        await post(server, chat, {"messages": MESSAGES, "temperature": 0.7, "top_k": 0})
    plain, model, request = (sent.params for sent in engine.generated)
    assert (plain.temperature, plain.top_k, plain.max_tokens) == (1.0, 0, 16)
    assert (model.temperature, model.top_k, model.max_tokens) == (0.2, 20, None)
    assert (request.temperature, request.top_k) == (0.7, 0)


async def test_every_sampling_field_arrives(serve: Any, engine: Any) -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -3,
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 2,
        "skip_special_tokens": False,
    }
    async with serve() as server:
        body = {"prompt": "hi", **fields, "stop": "x", "cache_salt": "s", "logprobs": 3}
        await post(server, "/v1/completions", body | {"add_special_tokens": False})
        body = {"messages": MESSAGES, **fields, "stop": ["x", "y"], "max_completion_tokens": 9}
        await post(server, "/v1/chat/completions", body | {"chat_template_kwargs": {"think": 1}})
    completion, chat = engine.generated
    for sent in (completion, chat):
        got = msgspec.to_builtins(sent.params)
        assert {**got, "stop_token_ids": list(got["stop_token_ids"])}.items() >= fields.items()
    assert (completion.params.stop, chat.params.stop) == (("x",), ("x", "y"))
    assert (completion.cache_salt, completion.params.logprobs) == ("s", 3)
    assert not completion.prompt.add_special_tokens
    assert chat.prompt.template_kwargs == b'{"think":1}'


async def test_continue_final_message(serve: Any, engine: Any) -> None:
    async with serve() as server:
        body = {"messages": MESSAGES, "continue_final_message": True}
        status, _ = await post(server, "/v1/chat/completions", body)
    assert status == 200
    prompt = engine.generated[0].prompt
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


async def test_neutral_ignored_and_null_fields_are_accepted(serve: Any, engine: Any) -> None:
    body = {
        "messages": MESSAGES,
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text", "json_schema": None},
        "add_special_tokens": False,
        "include_reasoning": True,
        "guided_json": None,
        "no_such_field": None,
        "stop": None,
        "stream_options": None,
    }
    async with serve() as server:
        status, answer = await post(server, "/v1/chat/completions", body)
    assert status == 200, answer


async def test_request_id_is_used_and_echoed(serve: Any) -> None:
    async with serve() as server:
        for body in ({"prompt": "hi"}, {"prompt": "hi", "stream": True}):
            headers = {"X-Request-Id": "trace-17"}
            async with server.http.post("/v1/completions", json=body, headers=headers) as answer:
                assert answer.headers["X-Request-Id"] == "trace-17"
                assert '"id":"cmpl-trace-17"' in await answer.text()
        async with server.http.post("/v1/completions", json={"prompt": "hi"}) as answer:
            assert (await answer.json())["id"] == "cmpl-" + answer.headers["X-Request-Id"]


async def test_content_type_does_not_matter(serve: Any) -> None:
    async with serve() as server:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        body = b'{"prompt": "hi"}'
        async with server.http.post("/v1/completions", data=body, headers=headers) as answer:
            assert answer.status == 200


async def test_a_hundred_streams_at_once(serve: Any, client: EngineClient) -> None:
    async with serve() as server:
        bodies = [{"messages": MESSAGES, "seed": i} for i in range(100)]
        answers = await asyncio.gather(
            *(events(server, "/v1/chat/completions", body) for body in bodies)
        )
    for got in answers:
        assert "".join(event["choices"][0]["delta"]["content"] for event in got) == TEXT
    assert len({got[0]["id"] for got in answers}) == 100
    assert client.num_open == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_sampling_options_of_vllm(serve: Any, engine: Any, path: str) -> None:
    options = {
        "presence_penalty": -2,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1, "7": -100},
        "allowed_token_ids": [5, 7],
        "bad_words": ["no"],
        "prompt_logprobs": 3,
        "vllm_xargs": {"mine": [1]},
    }
    prompt = {"prompt": "hi"} if path.endswith("v1/completions") else {"messages": MESSAGES}
    async with serve() as server:
        status, answer = await post(server, path, {**prompt, **options})
        assert status == 200, answer
    (request,) = engine.generated
    params = request.params
    assert {name: getattr(params, name) for name in ("presence_penalty", "frequency_penalty")} == {
        "presence_penalty": -2,
        "frequency_penalty": 1.5,
    }
    assert params.repetition_penalty == 1.1
    assert params.logit_bias == {5: 1, 7: -100}
    assert params.allowed_token_ids == (5, 7)
    assert params.bad_words == ("no",)
    assert params.prompt_logprobs == 3
    assert params.extra_args == {"mine": [1]}


async def test_prompt_logprobs(serve: Any) -> None:
    expected = [
        None,
        {
            "8": {"logprob": -4.5, "rank": 5, "decoded_token": "p"},
            "0": {"logprob": -1.0, "rank": 1, "decoded_token": "t0"},
        },
        {
            "9": {"logprob": -4.5, "rank": 5, "decoded_token": "p"},
            "0": {"logprob": -1.0, "rank": 1, "decoded_token": "t0"},
        },
    ]
    async with serve() as server:
        body = {"messages": MESSAGES, "prompt_logprobs": 1, "n": 2}
        status, chat = await post(server, "/v1/chat/completions", body)
        assert (status, chat["prompt_logprobs"]) == (200, expected)
        assert not any("prompt_logprobs" in choice for choice in chat["choices"])
        body = {"prompt": ["a", "b"], "prompt_logprobs": 1, "n": 2}
        status, completion = await post(server, "/v1/completions", body)
        assert [choice["prompt_logprobs"] for choice in completion["choices"]] == [expected] * 4
        _, plain = await post(server, "/v1/completions", {"prompt": "a"})
    assert "prompt_logprobs" not in plain["choices"][0]
