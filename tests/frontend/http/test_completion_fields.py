"""Fields of completions that show more than the output: echo, token ids, usage as it grows."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ringcast.actors.text.tokenizer_core import TokenizerCore
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec

TEXT = "Hello, wörld 🌍!"
PATH = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def post(server: Any, body: Any, path: str = PATH) -> tuple[int, Any]:
    async with server.http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def events(server: Any, body: Any, path: str = PATH) -> list[Any]:
    async with server.http.post(path, json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        *lines, _, _ = (await answer.text()).split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_echo(serve: Any, tokenizer: Any) -> None:
    async with serve() as server:
        _, asked = await post(server, {"prompt": "hé"}, "/tokenize")
        body = {"prompt": ["Once ", "Twice "], "echo": True, "n": 2}
        _, answer = await post(server, body)
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [f"Once {TEXT}"] * 2 + [f"Twice {TEXT}"] * 2
        _, answer = await post(server, {"prompt": asked["tokens"], "echo": True})
        assert answer["choices"][0]["text"] == "hé" + TEXT
        assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_of_ids_without_a_tokenizer(
    serve: Any, engine: Any, spec: ModelSpec, stream: bool
) -> None:
    engine.tokenizer = TokenizerCore(spec, None)
    async with serve() as server:
        status, answer = await post(server, {"prompt": [1], "echo": True, "stream": stream})
    assert (status, answer["error"]["param"]) == (400, "echo")
    assert "skip_tokenizer_init" in answer["error"]["message"]


async def test_echo_in_a_stream(serve: Any, tokenizer: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["A", "B"], "n": 2, "echo": True}
    async with serve() as server:
        plain = await events(server, body)
        *counted, last = await events(server, {**body, "stream_options": options})
    for got in (plain, counted):
        texts = dict.fromkeys(range(4), "")
        for event in got:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == {0: "A" + TEXT, 1: "A" + TEXT, 2: "B" + TEXT, 3: "B" + TEXT}
    assert not any("usage" in event for event in plain)
    assert counted[0]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
    }
    assert last["choices"] == []


async def test_echo_with_logprobs(serve: Any, tokenizer: Any, engine: Any) -> None:
    """The fake prompt is three tokens, of which the last two are called "p"."""
    async with serve() as server, connect(server) as api:
        answer = await api.completions.create(
            model="fake-model", prompt=[104, 105, 106], echo=True, logprobs=1, max_tokens=2
        )
        _, name = await post(server, {"tokens": [104]}, "/detokenize")
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.tokens == [name["prompt"], "p", "p", "Hello", ","]
    assert logprobs.token_logprobs == [None, -4.5, -4.5, -0.5, -0.5]
    assert logprobs.top_logprobs == [
        None,
        *[{"t0": -1.0, "p": -4.5}] * 2,
        {"t0": -1.0, "Hello": -0.5},
        {"t0": -1.0, ",": -0.5},
    ]
    assert logprobs.text_offset[:3] == [0, 1, 2]
    assert choice.text[logprobs.text_offset[3] :] == "Hello,"
    assert not hasattr(choice, "prompt_logprobs")
    assert engine.generated[0].params.prompt_logprobs == 1


async def test_a_token_put_before_the_text_has_no_length(serve: Any, tokenizer: Any) -> None:
    async with serve() as server:
        body = {"prompt": "pp", "echo": True, "logprobs": 0, "max_tokens": 1}
        _, answer = await post(server, body)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"][1:] == ["p", "p", "Hello"]
    assert logprobs["text_offset"] == [0, 0, 1, 2]


async def test_only_the_prompt(serve: Any, tokenizer: Any, engine: Any) -> None:
    body = {"prompt": "pp", "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    async with serve() as server:
        status, answer = await post(server, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["text"] == "pp"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -4.5, -4.5]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([7, 8, 9], [])
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == 7
    assert engine.generated[0].params.max_tokens == 1


async def test_echo_with_prompt_logprobs_and_names_of_ids(serve: Any, tokenizer: Any) -> None:
    body = {
        "prompt": [[104, 105, 106]],
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    async with serve() as server:
        status, answer = await post(server, body)
    assert status == 200, answer
    assert answer["choices"][0]["logprobs"]["tokens"][0] == "token_id:104"
    assert len(answer["choices"][0]["prompt_logprobs"]) == 3


async def test_token_ids(serve: Any) -> None:
    async with serve() as server:
        body = {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 2, "return_token_ids": True}
        _, answer = await post(server, body)
        _, chat = await post(server, {**CHAT, "return_token_ids": True}, "/v1/chat/completions")
        _, plain = await post(server, {"prompt": "a"})
    assert [choice["token_ids"] for choice in answer["choices"]] == [[100, 101]] * 4
    of_prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert of_prompts == [[1, 2], [1, 2], [3], [3]]
    assert chat["prompt_token_ids"] == [7, 8, 9]
    assert chat["choices"][0]["token_ids"] == [100, 101, 102, 103, 104]
    assert "prompt_token_ids" not in chat["choices"][0]
    assert not {"token_ids", "prompt_token_ids"} & {*plain["choices"][0], *plain}


@pytest.mark.parametrize(
    ("path", "body"), [(PATH, {"prompt": "hi"}), ("/v1/chat/completions", CHAT)]
)
async def test_usage_in_each_event(serve: Any, engine: Any, path: str, body: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serve() as server:
        *got, last = await events(server, {**body, "stream_options": options}, path)
    assert [event["usage"] for event in got] == [
        {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
        for count in (1, 2, 3, 4, 5, 5)
    ]
    assert last["usage"]["completion_tokens"] == 5
    assert engine.generated[0].output.continuous_usage


@pytest.mark.parametrize(
    ("fields", "keep"),
    [
        ({}, 0),
        ({"truncate_prompt_tokens": 5}, 5),
        ({"truncate_prompt_tokens": 512}, 512),
        ({"truncate_prompt_tokens": -1}, 511),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, 412),
    ],
)
async def test_truncation(serve: Any, engine: Any, fields: Any, keep: int) -> None:
    async with serve() as server:
        assert (await post(server, {"prompt": "a", **fields}))[0] == 200
        assert (await post(server, {**CHAT, **fields}, "/v1/chat/completions"))[0] == 200
    assert [sent.keep_prompt_tokens for sent in engine.generated] == [keep, keep]


async def test_best_of_that_asks_for_nothing(serve: Any, engine: Any) -> None:
    async with serve() as server:
        for fields in ({"best_of": 1}, {"best_of": 2, "n": 2}, {"suffix": ""}, {"echo": False}):
            assert (await post(server, {"prompt": "a", **fields}))[0] == 200, fields


async def test_token_names_are_asked_of_the_engine(serve: Any, engine: Any) -> None:
    async with serve() as server:
        await post(server, {"prompt": "a", "logprobs": 1, "return_tokens_as_token_ids": True})
        await post(server, {"prompt": [5]})
    named, plain = engine.generated
    assert (named.output.tokens_as_ids, plain.output.tokens_as_ids) == (True, False)
    assert plain.prompt.token_ids == codec.pack([5])


def connect(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
