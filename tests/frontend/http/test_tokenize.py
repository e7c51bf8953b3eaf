"""/tokenize and /detokenize over HTTP, answered by a real tokenizer core."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ringcast.frontend.client import EngineClient
from ringcast.mq.errors import EngineDeadError

MESSAGES = [{"role": "user", "content": "hi"}]
RENDERED = "<|user|>hi\n<|assistant|>"
pytestmark = pytest.mark.usefixtures("tokenizer")


async def post(server: Any, path: str, body: Any) -> tuple[int, Any]:
    async with server.http.post(path, json=body) as answer:
        return answer.status, await answer.json()


async def text_of(server: Any, ids: list[int]) -> str:
    status, answer = await post(server, "/detokenize", {"tokens": ids})
    assert status == 200, answer
    assert list(answer) == ["prompt"]
    return str(answer["prompt"])


async def test_a_text(serve: Any, engine: Any) -> None:
    async with serve() as server:
        status, answer = await post(server, "/tokenize", {"prompt": "wörld", "model": "fake-model"})
        assert status == 200
        ids = answer.pop("tokens")
        assert answer == {"count": 6, "max_model_len": 512, "token_strs": None}
        assert len(ids) == 6
        assert await text_of(server, ids) == "wörld"
    assert engine.generated == []


async def test_token_strs_are_the_vocabularys(serve: Any) -> None:
    async with serve() as server:
        body = {"prompt": "a b<s>", "return_token_strs": True}
        _, answer = await post(server, "/tokenize", body)
    assert answer["token_strs"] == ["a", "Ġ", "b", "<s>"]
    assert answer["tokens"][-1] == 256


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, RENDERED),
        ({"add_generation_prompt": False}, RENDERED.removesuffix("<|assistant|>")),
        ({"continue_final_message": True}, "<|user|>hi"),
        ({"add_special_tokens": False, "tools": []}, RENDERED),
    ],
)
async def test_messages(serve: Any, fields: Any, text: str) -> None:
    async with serve() as server:
        status, answer = await post(server, "/tokenize", {"messages": MESSAGES, **fields})
        assert status == 200, answer
        assert answer["count"] == len(answer["tokens"]) == len(text)
        assert await text_of(server, answer["tokens"]) == text


async def test_special_tokens_are_text_and_none_is_none(serve: Any) -> None:
    async with serve() as server:
        assert await text_of(server, [257, 256]) == "</s><s>"
        assert await text_of(server, []) == ""


async def test_more_than_the_context_is_counted(serve: Any) -> None:
    """Within reason: a text whose beginning shows that it can't fit is not read to its end."""
    async with serve() as server:
        status, answer = await post(server, "/tokenize", {"prompt": "x" * 1000})
        assert (status, answer["count"]) == (200, 1000)
        status, answer = await post(server, "/tokenize", {"prompt": "x" * 100_000})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "tools": ["f"]}, "tools[0]"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "no_such": 1}, "no_such"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "skip_special_tokens": True}, "skip_special_tokens"),
    ],
)
async def test_refusals(serve: Any, path: str, body: Any, param: str) -> None:
    async with serve() as server:
        status, answer = await post(server, path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_a_model_that_is_not_there(serve: Any) -> None:
    async with serve() as server:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert (await post(server, path, {**body, "model": "x"}))[0] == 404


async def test_questions_are_asked_again_after_a_death(
    serve: Any, client: EngineClient, engine: Any, until: Any
) -> None:
    async with serve() as server:
        engine.deaf = True
        asking = asyncio.create_task(post(server, "/tokenize", {"prompt": "ab"}))
        await until(lambda: len(engine.sent) == 1)
        client.lost(["tokenizer.0"], "died")
        late = asyncio.create_task(post(server, "/detokenize", {"tokens": [256]}))
        await until(lambda: client.room == 198)
        assert len(engine.sent) == 1
        engine.deaf = False
        client.regained(["tokenizer.0"])
        assert (await asking)[1]["count"] == 2
        assert (await late)[1] == {"prompt": "<s>"}
    assert len(engine.sent) == 3
    assert client.room == 200


async def test_a_question_that_kills_the_tokenizer_is_not_asked_a_third_time(
    serve: Any, client: EngineClient, engine: Any, until: Any
) -> None:
    engine.deaf = True
    async with serve() as server:
        asking = asyncio.create_task(post(server, "/tokenize", {"prompt": "ab"}))
        for count in (1, 2):
            await until(lambda count=count: len(engine.sent) == count)
            client.lost(["tokenizer.0"], "segmentation fault")
            client.regained(["tokenizer.0"])
        status, answer = await asking
    assert status == 500
    assert "segmentation fault" in answer["error"]["message"]
    assert len(engine.sent) == 2


async def test_draining_and_death(
    serve: Any, client: EngineClient, engine: Any, until: Any
) -> None:
    async with serve() as server:
        engine.deaf = True
        asking = asyncio.create_task(post(server, "/tokenize", {"prompt": "ab"}))
        await until(lambda: len(engine.sent) == 1)
        client.draining = True
        idle = asyncio.create_task(client.wait_idle())
        assert (await post(server, "/tokenize", {"prompt": "ab"}))[0] == 503
        assert not idle.done()
        client.fail_all(EngineDeadError("worker.0 died"))
        assert (await asking)[0] == 500
        await idle
        assert (await post(server, "/detokenize", {"tokens": [1]}))[0] == 500


async def test_a_late_answer_is_dropped(serve: Any, client: EngineClient, engine: Any) -> None:
    async with serve() as server:
        await post(server, "/tokenize", {"prompt": "ab"})
        (question,) = engine.sent
        engine.send("tokenizer.0", question)
        await post(server, "/tokenize", {"prompt": "ab"})
    assert client.statistics()["dropped"] == 1
