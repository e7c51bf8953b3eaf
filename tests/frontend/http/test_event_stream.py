"""Events that are written without a task: what is in a write, and who is too slow for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from ringcast.frontend.http.event_stream import EventStream, WriteBatch

GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@contextlib.asynccontextmanager
async def connected(
    work: Callable[[EventStream], Awaitable[None]], ask: bytes = GET
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection whose request is answered by a stream that `work` writes to."""
    batch = WriteBatch()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        stream = EventStream({}, batch)
        await stream.open(request)  # type: ignore[arg-type]
        await work(stream)
        with contextlib.suppress(ConnectionResetError):
            await stream.end(b"END")
        return stream.response

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
    writer.write(ask)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        await runner.cleanup()


async def body(reader: asyncio.StreamReader) -> bytes:
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.")
    assert b"text/event-stream" in head
    return rest


async def rounds(stream: EventStream) -> None:
    for events in ([b"a", b"bb"], [b"c"]):
        for event in events:
            assert stream.offer(event)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert stream.offer(b"d")  # and no round after it


async def test_what_comes_together_is_one_write() -> None:
    async with connected(rounds) as (reader, _):
        said = await body(reader)
    assert said == b"3\r\nabb\r\n1\r\nc\r\n1\r\nd\r\n3\r\nEND\r\n0\r\n\r\n"


async def test_http_1_0_has_no_chunks() -> None:
    async with connected(rounds, GET.replace(b"1.1", b"1.0")) as (reader, _):
        assert await body(reader) == b"abbcdEND"


async def test_a_write_comes_after_what_was_offered() -> None:
    async def work(stream: EventStream) -> None:
        assert stream.offer(b"a")
        await stream.write(b"b")
        assert stream.offer(b"c")

    async with connected(work, GET.replace(b"1.1", b"1.0")) as (reader, _):
        assert await body(reader) == b"abcEND"


async def test_a_client_that_does_not_read_is_refused_and_loses_nothing() -> None:
    event, offered, refused = b"x" * 50_000, 0, asyncio.Event()

    async def work(stream: EventStream) -> None:
        nonlocal offered
        while stream.offer(event):
            offered += 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        refused.set()
        await stream.write(b"y")

    async with connected(work, GET.replace(b"1.1", b"1.0")) as (reader, _):
        await refused.wait()
        said = await body(reader)
    assert offered > 1
    assert said == event * offered + b"yEND"


async def test_nothing_is_offered_to_who_has_hung_up(until: Any) -> None:
    answers: list[bool] = []

    async def work(stream: EventStream) -> None:
        assert stream.offer(b"a")
        await until(lambda: not stream.offer(b"b"))
        answers.append(stream.offer(b"c"))

    async with connected(work) as (reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        await until(lambda: answers)
    assert answers == [False]
