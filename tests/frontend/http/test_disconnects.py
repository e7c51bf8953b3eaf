"""A client that hangs up frees what its request holds, streaming or not, waiting or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from ringcast.frontend.client import EngineClient
from ringcast.frontend.http.http_server import HttpServer
from ringcast.frontend.http.listener import bind
from ringcast.mq.server_config import ServerConfig

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def connect(port: int, path: str, body: Any) -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\n" % path.encode())
    writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
    return reader, writer


async def hang_up(writer: Any) -> None:
    writer.transport.abort()
    await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token(
    serve: Any, until: Any, client: EngineClient, engine: Any, stream: bool
) -> None:
    engine.hold = 0
    async with serve() as server:
        body = {**CHAT, "stream": stream, "n": 2}
        _, writer = await connect(server.port, "/v1/chat/completions", body)
        await until(lambda: engine.generated)
        assert engine.aborted == []
        await hang_up(writer)
        await until(lambda: engine.aborted)
        await client.wait_idle()
    assert engine.aborted == [engine.generated[0].request_id]


async def test_in_the_middle_of_a_stream(
    serve: Any, until: Any, client: EngineClient, engine: Any
) -> None:
    engine.hold = 2
    async with serve() as server:
        body = {**CHAT, "stream": True}
        reader, writer = await connect(server.port, "/v1/chat/completions", body)
        await reader.readuntil(b'"Hello"')
        await hang_up(writer)
        await until(lambda: engine.aborted)
        await client.wait_idle()


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_nothing_of_it_stays_in_memory(
    serve: Any, until: Any, client: EngineClient, engine: Any, alive: Any, stream: bool
) -> None:
    """Not even for as long as a connection may be idle."""
    engine.hold = 2
    async with serve(keep_alive_timeout=1000, header_timeout=1000, body_timeout=1000) as server:
        before, tasks = alive(), asyncio.all_tasks()
        for number in range(1, 21):
            body = {**CHAT, "stream": stream}
            reader, writer = await connect(server.port, "/v1/chat/completions", body)
            await until(lambda number=number: len(engine.generated) == number)
            if stream:
                await reader.readuntil(b'"Hello"')
            await hang_up(writer)
        await until(lambda: len(engine.aborted) == 20)
        await client.wait_idle()
        await until(lambda: not asyncio.all_tasks() - tasks)
        assert alive() == before


@pytest.mark.parametrize("stream", [False, True])
async def test_with_several_prompts(serve: Any, until: Any, engine: Any, stream: bool) -> None:
    engine.hold = 0
    async with serve() as server:
        body = {"prompt": ["a", "b", "c"], "stream": stream}
        _, writer = await connect(server.port, "/v1/completions", body)
        await until(lambda: len(engine.generated) == 3)
        await hang_up(writer)
        await until(lambda: len(engine.aborted) == 3)


async def test_a_client_that_shuts_its_side_politely(serve: Any, until: Any, engine: Any) -> None:
    engine.hold = 1
    async with serve() as server:
        body = {**CHAT, "stream": True}
        _, writer = await connect(server.port, "/v1/chat/completions", body)
        await until(lambda: engine.generated)
        writer.close()
        await until(lambda: engine.aborted)


async def test_others_go_on(serve: Any, until: Any, engine: Any) -> None:
    engine.hold = 1
    async with serve() as server:
        body = {**CHAT, "stream": True}
        async with server.http.post("/v1/chat/completions", json=body) as other:
            _, writer = await connect(server.port, "/v1/chat/completions", body)
            await until(lambda: len(engine.generated) == 2)
            await hang_up(writer)
            await until(lambda: engine.aborted)
            assert engine.aborted == [engine.generated[1].request_id]
            engine.hold = None
            assert (await other.text()).endswith("data: [DONE]\n\n")


async def test_a_slow_reader_slows_only_itself(
    serve: Any, until: Any, client: EngineClient, engine: Any
) -> None:
    """More than socket buffers hold waits for a client that doesn't read; others are served."""
    engine.words = ["x" * 100_000] * 200
    async with serve() as server:
        body = {"prompt": "hi", "stream": True, "max_tokens": 200}
        _, writer = await connect(server.port, "/v1/completions", body)
        await until(lambda: client.num_open == 0 and engine.generated)
        quick = {"prompt": "hi", "max_tokens": 1}
        async with server.http.post("/v1/completions", json=quick) as answer:
            assert answer.status == 200
        await hang_up(writer)


async def test_a_reset_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Written to a connection that is closing, before the handler is cancelled."""
    tried = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        try:
            await response.write(b"more")
        finally:
            tried.set()
        return response

    app = web.Application()
    app.router.add_post("/", handler)
    server = HttpServer(app, ServerConfig())
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    await server.open(listener)
    try:
        _, writer = await connect(port, "/", {})
        await tried.wait()
        writer.close()
    finally:
        await server.close()
    assert not caplog.records
