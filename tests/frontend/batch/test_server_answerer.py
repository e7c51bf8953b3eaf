"""Answers of a running server: ours, and ones that fail in ways of their own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from ringcast.frontend.batch import server_answerer
from ringcast.frontend.batch.lines import BatchRequest
from ringcast.frontend.batch.server_answerer import ServerAnswerer
from ringcast.mq.errors import ConfigError, EngineDeadError, OverloadedError

URL = "/v1/completions"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def ask(body: Any) -> BatchRequest:
    return BatchRequest("a", URL, msgspec.json.encode(body))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_answerer, "_PAUSES", (0.001, 0.001))


@contextlib.asynccontextmanager
async def serving(handler: Handler, models_status: int = 200) -> AsyncIterator[str]:
    """A server that has a model, and answers completions by `handler`."""

    async def models(_: web.Request) -> web.Response:
        body = {"error": {"message": "no key"}} if models_status >= 400 else {"data": []}
        return web.json_response(body, status=models_status)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post(URL, handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def answered(response: Callable[[], web.StreamResponse]) -> Any:
    async def handler(_: web.Request) -> web.StreamResponse:
        return response()

    async with serving(handler) as url, ServerAnswerer(url, 2) as answerer:
        return await answerer.answer(ask({}))


async def test_our_own_server(serve: Any, engine: Any) -> None:
    async with serve() as server, ServerAnswerer(server.url + "/v1/", 2) as answerer:
        response = await answerer.answer(ask({"prompt": "hi", "max_tokens": 2}))
        assert response.status_code == 200
        body = msgspec.json.decode(response.body)
        assert body["choices"][0]["text"] == "Hello,"
        assert body["id"] == f"cmpl-{response.request_id}"
        response = await answerer.answer(ask({"prompt": 7}))
        assert response.status_code == 400
        assert msgspec.json.decode(response.body)["error"]["param"] == "prompt"


async def test_a_body_becomes_one_line() -> None:
    text = json.dumps({"a": ["b\n", 1.50, {"c": None}]}, indent=2)
    response = await answered(lambda: web.Response(text=text))
    assert bytes(response.body) == b'{"a":["b\\n",1.5,{"c":null}]}'
    assert len(response.request_id) == 32


async def test_a_page_is_no_answer() -> None:
    response = await answered(lambda: web.Response(text="<html>\nBad gateway", status=502))
    assert response.status_code == 502
    error = msgspec.json.decode(response.body)["error"]
    assert error["message"] == "no JSON came: <html>\nBad gateway"
    assert b"\n" not in bytes(response.body)


@pytest.mark.parametrize(
    ("status", "headers", "text", "seconds", "words"),
    [
        (503, {"Retry-After": "7"}, '{"error":{"message":"full","type":"x"}}', 7, "full"),
        (429, {}, "[]", 1, "overloaded"),
        (503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, "busy", 1, "no JSON came: busy"),
        (503, {"Retry-After": "99999"}, "busy", 60, "busy"),
    ],
)
async def test_who_is_overloaded_says_for_how_long(
    status: int, headers: dict[str, str], text: str, seconds: float, words: str
) -> None:
    with pytest.raises(OverloadedError, match=words) as caught:
        await answered(lambda: web.Response(text=text, status=status, headers=headers))
    assert caught.value.retry_after == seconds


@pytest.mark.parametrize("num_failures", [2, 3])
async def test_a_connection_that_breaks_is_made_again(num_failures: int) -> None:
    num_asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal num_asked
        num_asked += 1
        if num_asked <= num_failures:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(text="{}")

    async with serving(handler) as url, ServerAnswerer(url, 2) as answerer:
        if num_failures == 3:
            with pytest.raises(EngineDeadError, match=f"{url} answers no more"):
                await answerer.answer(ask({}))
        else:
            assert (await answerer.answer(ask({}))).status_code == 200
    assert num_asked == 3


async def test_a_server_that_isnt_there_or_doesnt_want_us() -> None:
    with pytest.raises(ConfigError, match="no server answers there"):
        async with ServerAnswerer("http://127.0.0.1:9", 2):
            pass

    async def handler(_: web.Request) -> web.StreamResponse:
        raise AssertionError

    async with serving(handler, 401) as url:
        with pytest.raises(ValueError, match="no key"):
            async with ServerAnswerer(url, 2):
                pass
