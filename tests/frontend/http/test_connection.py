"""Clients that are slow, on purpose or not: they hold nothing for long, and hinder nobody."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from ringcast.frontend.client import EngineClient

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that still comes, once the server has hung up."""
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionError:
        return b""


async def test_headers_that_never_end(serve: Any, engine: Any) -> None:
    async with serve(header_timeout=0.2) as server:
        slow = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
        for number, (_, writer) in enumerate(slow):
            writer.write(HEAD[: 10 * number])
        async with server.http.post("/v1/completions", json={"prompt": "hi"}) as answer:
            assert answer.status == 200
        begun = asyncio.get_running_loop().time()
        dripping = asyncio.create_task(drip(slow[4][1]))
        for reader, writer in slow:
            assert await ended(reader) == b""
            writer.close()
        await dripping
        assert asyncio.get_running_loop().time() - begun < 2
    assert len(engine.generated) == 1


async def drip(writer: asyncio.StreamWriter) -> None:
    """A header field that goes on and on: it's the whole that counts, not the last byte."""
    while not writer.transport.is_closing():
        writer.write(b"x")
        await asyncio.sleep(0.02)


async def test_a_body_that_never_ends(serve: Any, engine: Any) -> None:
    async with serve(body_timeout=0.1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD + b'Content-Length: 1000\r\n\r\n{"prompt":')
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        body = json.loads(await reader.readuntil(b"}}"))
        assert body["error"]["code"] == "request_timeout"
        writer.close()
    assert engine.sent == []


async def test_a_body_in_time_may_take_long_to_answer(serve: Any, engine: Any, until: Any) -> None:
    """The limit is on the body: it's not on what comes after it."""
    engine.hold = 1
    async with serve(body_timeout=0.1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = b'{"prompt": "hi"}'
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body[:3]))
        await asyncio.sleep(0.02)
        writer.write(body[3:])
        await until(lambda: engine.generated)
        await asyncio.sleep(0.2)
        engine.hold = None
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_an_idle_connection(serve: Any) -> None:
    async with serve(keep_alive_timeout=0.2, header_timeout=10) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(3):  # each request begins the time again
            await asyncio.sleep(0.1)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await ended(reader) == b""
        writer.close()


async def test_a_second_request_has_no_longer_for_its_headers(serve: Any) -> None:
    async with serve(keep_alive_timeout=10, header_timeout=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3)
        writer.write(b"GET /health HTTP/1.1\r\nHo")
        assert await ended(reader) == b""
        writer.close()


@pytest.mark.parametrize(
    "fields", [b"X-Long: %b\r\n" % (b"x" * 10_000), b"X-A: 1\r\n" * 200, b"no field\r\n"]
)
async def test_headers_that_are_too_much(serve: Any, engine: Any, fields: bytes) -> None:
    async with serve() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD + fields + b"Content-Length: 0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.0 400 ")
        await ended(reader)
        writer.close()
    assert engine.sent == []


def unread(port: int) -> socket.socket:
    """A connection whose client takes little in."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    return client


def post(client: socket.socket, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    client.sendall(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(data), data))


async def test_a_stream_that_is_not_read_is_cut_off(
    serve: Any, until: Any, client: EngineClient, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its request ends in the engine, and others go on all the while."""
    engine.words = ["x" * 100_000] * 200
    engine.hold = 199
    async with serve(max_client_lag=0.3) as server:
        with unread(server.port) as slow:
            post(slow, {"prompt": "hi", "stream": True, "max_tokens": 200})
            await until(lambda: engine.generated)
            served = 0
            while not engine.aborted:
                quick = {"prompt": "hi", "max_tokens": 1}
                async with server.http.post("/v1/completions", json=quick) as answer:
                    assert answer.status == 200
                served += 1
            assert served > 1
            assert engine.aborted == [engine.generated[0].request_id]
            await client.wait_idle()
    assert "--max-client-lag" in caplog.text


async def test_a_whole_answer_that_is_not_read_is_cut_off(
    serve: Any, until: Any, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.words = ["x" * 1_000_000] * 16
    async with serve(max_client_lag=0.2) as server:
        with unread(server.port) as slow:
            post(slow, {"prompt": "hi", "max_tokens": 16})
            await until(lambda: "--max-client-lag" in caplog.text)


async def test_a_stream_that_is_read_slowly_but_steadily_is_not(
    serve: Any, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.words = ["x" * 100_000] * 40
    async with serve(max_client_lag=1.0) as server:
        body = {"prompt": "hi", "stream": True, "max_tokens": 40}
        async with server.http.post("/v1/completions", json=body) as answer:
            size = 0
            async for data in answer.content.iter_chunked(200_000):
                size += len(data)
                await asyncio.sleep(0.06)
    assert size > 4_000_000
    assert "--max-client-lag" not in caplog.text
