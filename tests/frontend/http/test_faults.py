"""What HTTP clients see when actors die, hang or drain."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ringcast.frontend.client import EngineClient
from ringcast.frontend.http import app
from ringcast.mq.errors import EngineDeadError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = "Hello, wörld 🌍!"
ENGINE = ["worker.0", "scheduler.0"]
POSTS = [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})]


async def crash(client: EngineClient, engine: Any, error: str = "worker.0 was killed") -> None:
    await engine.crash()
    client.lost(ENGINE, error)
    client.regained(ENGINE)


async def get(server: Any, path: str) -> tuple[int, str]:
    async with server.http.get(path) as answer:
        if answer.status == 503:
            assert int(answer.headers["Retry-After"]) >= 1
        text = await answer.text()
        return answer.status, json.loads(text)["error"]["message"] if text else ""


def text_of(events: str) -> str:
    *lines, done, end = events.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert [choice["delta"].get("role") for choice in choices] == [
        "assistant",
        None,
        None,
        None,
        None,
        None,
    ]
    return "".join(choice["delta"]["content"] for choice in choices)


async def test_a_stream_goes_on_after_its_engine_died(
    serve: Any, client: EngineClient, engine: Any, until: Any
) -> None:
    engine.hold = 2
    async with serve() as server:
        body = {**CHAT, "stream": True}
        async with server.http.post("/v1/chat/completions", json=body) as answer:
            first = await answer.content.readuntil(b"\n\n")
            first += await answer.content.readuntil(b"\n\n")
            await crash(client, engine)
            engine.hold = None
            rest = await answer.text()
    assert text_of(first.decode() + rest) == TEXT
    assert [sent.incarnation for sent in engine.generated] == [0, 1]


async def test_a_whole_answer_goes_on_too(
    serve: Any, client: EngineClient, engine: Any, until: Any
) -> None:
    engine.hold = 0
    async with serve() as server:
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "logprobs": 1}
        asked = asyncio.create_task(server.http.post("/v1/completions", json=body))
        await until(lambda: len(engine.generated) == 2)
        await crash(client, engine)
        engine.hold = None
        async with await asked as answer:
            choices = (await answer.json())["choices"]
    assert [choice["text"] for choice in choices] == [TEXT] * 4
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0, 5, 6, 12, 14]] * 4


async def test_what_comes_during_a_restart_waits_for_its_end(
    serve: Any, client: EngineClient, engine: Any, until: Any
) -> None:
    async with serve() as server:
        client.lost(ENGINE, "worker.0 was killed")
        asked = asyncio.create_task(server.http.post("/v1/chat/completions", json=CHAT))
        await until(lambda: client.num_open)
        assert engine.generated == []
        client.regained(ENGINE)
        async with await asked as answer:
            assert (await answer.json())["choices"][0]["message"]["content"] == TEXT


async def test_a_client_that_hangs_up_during_a_restart(
    serve: Any, client: EngineClient, engine: Any, until: Any
) -> None:
    async with serve() as server:
        client.lost(ENGINE, "worker.0 was killed")
        asked = asyncio.create_task(server.http.post("/v1/chat/completions", json=CHAT))
        await until(lambda: client.num_open)
        asked.cancel()
        await until(lambda: not client.num_open)
        client.regained(ENGINE)
        assert engine.sent == []


async def test_a_poisonous_request_fails_with_both_deaths(
    serve: Any, client: EngineClient, engine: Any, until: Any
) -> None:
    engine.hold = 0
    async with serve() as server:
        asked = asyncio.create_task(server.http.post("/v1/chat/completions", json=CHAT))
        await until(lambda: len(engine.generated) == 1)
        await crash(client, engine)
        await crash(client, engine, "worker.0 was killed again")
        async with await asked as answer:
            assert answer.status == 500
            error = (await answer.json())["error"]
    assert error["type"] == "internal_server_error"
    assert "under way at 2 deaths of the engine in a row" in error["message"]
    assert error["message"].endswith("worker.0 was killed again")
    assert len(engine.generated) == 2


async def test_a_poisonous_stream_ends_with_the_error(
    serve: Any, client: EngineClient, engine: Any
) -> None:
    engine.hold = 1
    async with serve() as server:
        body = {**CHAT, "stream": True}
        async with server.http.post("/v1/chat/completions", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            await crash(client, engine)
            await crash(client, engine, "worker.0 was killed again")
            last = json.loads((await answer.text()).removeprefix("data: "))
    assert "2 deaths of the engine in a row" in last["error"]["message"]
    assert last["error"]["code"] == 500


async def test_ping_is_health(serve: Any, client: EngineClient) -> None:
    async with serve() as server:
        for method in ("GET", "POST"):
            async with server.http.request(method, "/ping") as answer:
                assert (answer.status, await answer.text()) == (200, "")
        client.fail_all(EngineDeadError("worker.0 died too often"))
        for path in ("/ping", "/health", "/ready"):
            async with server.http.get(path) as answer:
                assert answer.status == 503
                assert "died too often" in await answer.text()


async def test_ready_when_idle_and_when_busy(serve: Any, engine: Any) -> None:
    async with serve() as server:
        assert await get(server, "/ready") == (200, "")
        assert len(engine.sent) == 1
        engine.deaf = True
        async with server.http.post("/v1/chat/completions", json=CHAT) as answer:
            await answer.read()
        assert await get(server, "/ready") == (200, "")


async def test_an_engine_that_hangs_is_alive_and_not_ready(
    serve: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "READY_SECONDS", 0.01)
    engine.deaf = True
    async with serve() as server:
        assert await get(server, "/ready") == (503, "the engine has not answered for 0.01 s")
        assert await get(server, "/health") == (200, "")


async def test_while_something_is_down(serve: Any, client: EngineClient) -> None:
    async with serve() as server:
        client.lost(["tokenizer.0"], "tokenizer.0 was killed by SIGKILL")
        status, message = await get(server, "/ready")
        assert status == 503
        assert message == "tokenizer.0 will be started again: tokenizer.0 was killed by SIGKILL"
        assert await get(server, "/health") == (200, "")
        client.regained(["tokenizer.0"])
        assert await get(server, "/ready") == (200, "")


@pytest.mark.parametrize("stream", [False, True])
async def test_draining(serve: Any, client: EngineClient, engine: Any, stream: bool) -> None:
    async with serve() as server:
        client.draining = True
        for path, body in POSTS:
            async with server.http.post(path, json={**body, "stream": stream}) as answer:
                assert answer.status == 503
                assert answer.headers["Retry-After"] == "1"
                assert "shutting down" in (await answer.json())["error"]["message"]
        status, message = await get(server, "/ready")
        assert (status, "shutting down" in message) == (503, True)
        assert await get(server, "/health") == (200, "")
        assert engine.sent == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_answer_in_several_chunks_is_the_same(serve: Any, engine: Any, path: str) -> None:
    body = {**dict(POSTS)[path], "n": 2, "logprobs": True if "chat" in path else 1}
    answers = []
    async with serve() as server:
        for checkpoint in (64, 2, 1):
            engine.checkpoint = checkpoint
            async with server.http.post(path, json=body) as answer:
                whole = await answer.json()
                answers.append((whole["choices"], whole["usage"]))
    assert answers[0] == answers[1] == answers[2]
    assert TEXT in str(answers[0])
