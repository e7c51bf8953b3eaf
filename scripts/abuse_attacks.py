"""The attacks of scripts/abuse. Each says how it went, and raises AssertionError if badly.

An attack talks over bare sockets. `times` is how often it does its thing, at scale 1.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

HEADER_SECONDS, BODY_SECONDS, LAG_SECONDS = 3.0, 3.0, 3.0  # as the server is told
_SLACK = 4.0  # seconds more until a connection must be closed
_DEAF_SECONDS = 180.0
AT_A_TIME = 100
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    model: str

    async def open(self) -> tuple[Reader, Writer]:
        return await asyncio.open_connection(self.host, self.port)

    def post(self, path: str, body: bytes, *headers: str) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "Host: a", "Content-Type: application/json", *headers]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body

    def completion(self, **fields: object) -> bytes:
        asked = {"model": self.model, "prompt": "a b c", **fields}
        return self.post("/v1/completions", json.dumps(asked).encode())


Attack = Callable[[Target, int, random.Random], Awaitable[str]]


async def closed(reader: Reader, seconds: float) -> bytes:
    """What comes until the server closes, which it must."""
    try:
        return await asyncio.wait_for(reader.read(), seconds)
    except ConnectionError:
        return b""
    except TimeoutError:
        raise AssertionError(f"the connection is still open after {seconds:g} s") from None


async def each(times: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Do it so often, some at a time; whatever one raises ends all."""
    gate = asyncio.Semaphore(AT_A_TIME)

    async def one(number: int) -> None:
        async with gate:
            await work(number)

    async with asyncio.TaskGroup() as group:
        for number in range(times):
            group.create_task(one(number))


def hang_up(writer: Writer, reset: bool = False) -> None:
    if reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def tally(counts: Counter[int]) -> str:
    names = {0: "closed without an answer"}
    return ", ".join(f"{number} x {names.get(code, code)}" for code, number in counts.items())


async def drip(target: Target, times: int, text: bytes, seconds: float) -> Counter[int]:
    """Send text, then a byte at a time for ever."""
    counts: Counter[int] = Counter()

    async def one() -> None:
        reader, writer = await target.open()
        writer.write(text)

        async def more() -> None:
            while not writer.is_closing():
                writer.write(b"a")
                await asyncio.sleep(0.25)

        task = asyncio.create_task(more())
        try:
            counts[status(await closed(reader, seconds + _SLACK))] += 1
        finally:
            task.cancel()
            hang_up(writer)

    async with asyncio.TaskGroup() as group:
        for _ in range(times):
            group.create_task(one())
    return counts


async def slow_headers(target: Target, times: int, _: random.Random) -> str:
    counts = await drip(target, times, b"GET /health HTTP/1.1\r\nX-A: ", HEADER_SECONDS)
    assert set(counts) == {0}, tally(counts)
    return tally(counts)


async def slow_bodies(target: Target, times: int, _: random.Random) -> str:
    text = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
    counts = await drip(target, times, text, BODY_SECONDS + HEADER_SECONDS)
    assert set(counts) == {408}, tally(counts)
    return tally(counts)


async def half_open(target: Target, times: int, _: random.Random) -> str:
    """Connected, and never heard of again; half of them in the middle of a request."""

    async def one(number: int) -> None:
        reader, writer = await target.open()
        if number % 2:
            writer.write(b"POST /v1/completions HT")
        assert not await closed(reader, HEADER_SECONDS + _SLACK)
        hang_up(writer)

    async with asyncio.TaskGroup() as group:
        for number in range(times):
            group.create_task(one(number))
    return f"{times} closed by the server"


async def load(target: Target) -> int:
    """How many requests the server has open."""
    reader, writer = await target.open()
    writer.write(b"GET /load HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    body = (await closed(reader, 30)).partition(b"\r\n\r\n")[2]
    hang_up(writer)
    return int(json.loads(body)["server_load"])


async def deaf(target: Target, times: int, _: random.Random) -> str:
    """Streams of much text that nobody reads until the server has no request open.

    Of text for longer than it takes to fill what the kernel holds of it (4 MB), and LAG_SECONDS.
    """
    loop = asyncio.get_running_loop()
    all_over = asyncio.Event()

    async def one() -> None:
        with socket.socket() as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            own.setblocking(False)
            await loop.sock_connect(own, (target.host, target.port))
            request = target.completion(stream=True, n=4, max_tokens=4000, logprobs=20)
            await loop.sock_sendall(own, request)
            await all_over.wait()
            try:
                while data := await asyncio.wait_for(loop.sock_recv(own, 1 << 20), 30):
                    assert b"[DONE]" not in data, "all of it was kept for who did not read"
            except ConnectionError:
                return

    async with asyncio.timeout(_DEAF_SECONDS), asyncio.TaskGroup() as group:
        for _number in range(times):
            group.create_task(one())
        await asyncio.sleep(LAG_SECONDS)
        while await load(target):  # noqa: ASYNC110 - the event is in the server
            await asyncio.sleep(0.2)
        all_over.set()
    return f"{times} cut off"


async def resets(target: Target, times: int, rng: random.Random) -> str:
    """A reset in the middle of a stream."""

    async def one(_: int) -> None:
        reader, writer = await target.open()
        writer.write(target.completion(stream=True, max_tokens=1000))
        for _event in range(rng.randrange(1, 6)):
            await reader.readuntil(b"\n\n")
        hang_up(writer, reset=True)

    await each(times, one)
    return f"{times} reset after some events"


async def aborts(target: Target, times: int, rng: random.Random) -> str:
    """Hung up at any moment, in streams and others, with a reset or without."""
    begun = 0

    async def one(number: int) -> None:
        nonlocal begun
        reader, writer = await target.open()
        writer.write(target.completion(stream=number % 2 == 0, max_tokens=1000, n=1 + number % 2))
        if number % 4 == 0:
            await reader.readuntil(b"\n\n")
            begun += 1
        else:
            await asyncio.sleep(rng.random() ** 3 * 1.5)
        hang_up(writer, reset=rng.random() < 0.5)

    await each(times, one)
    return f"{times:,} hung up on, {begun:,} of them in a stream that had begun"


async def idle(target: Target, times: int, _: random.Random) -> str:
    """Many connections that do nothing after a first request; others are served meanwhile."""
    opened: list[tuple[Reader, Writer]] = []

    async def one(_: int) -> None:
        reader, writer = await target.open()
        opened.append((reader, writer))
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert status(await reader.readuntil(b"\r\n\r\n")) == 200

    try:
        await each(times, one)
        seconds = await ordinary(target)
    finally:
        for _reader, writer in opened:
            hang_up(writer)
    return f"{len(opened)} at a time; an ordinary request beside them took {1000 * seconds:.0f} ms"


async def garbage(target: Target, times: int, rng: random.Random) -> str:
    """Bytes that aren't HTTP."""
    starts = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x00\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : a\r\n\tb: c\r\n\r\n",
        b"",
    ]
    counts: Counter[int] = Counter()

    async def one(number: int) -> None:
        reader, writer = await target.open()
        start = starts[number % len(starts)]
        writer.write(start + rng.randbytes(rng.randrange(1, 2000)))
        if writer.can_write_eof() and number % 3 == 0:
            writer.write_eof()
        wait = HEADER_SECONDS + BODY_SECONDS + 2 * _SLACK
        counts[status(await closed(reader, wait))] += 1
        hang_up(writer)

    await each(times, one)
    assert not any(code >= 500 for code in counts), tally(counts)
    return tally(counts)


async def huge_headers(target: Target, times: int, _: random.Random) -> str:
    requests = [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a" * 100_000 + b": b\r\n\r\n",
    ]
    counts: Counter[int] = Counter()

    async def one(number: int) -> None:
        reader, writer = await target.open()
        try:
            writer.write(requests[number % len(requests)])
            counts[status(await closed(reader, HEADER_SECONDS + _SLACK))] += 1
        finally:
            hang_up(writer)

    await each(times, one)
    assert set(counts) <= {0, 400, 414, 431}, tally(counts)
    return tally(counts)


async def huge_bodies(target: Target, times: int, _: random.Random) -> str:
    """Announced as too large; sent in chunks without end."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
    counts: Counter[int] = Counter()

    async def one(number: int) -> None:
        reader, writer = await target.open()
        if number % 2:
            writer.write(head + b"Content-Length: 100000000000\r\n\r\n" + b"a" * 5_000_000)
        else:
            writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
            writer.write((b"10000\r\n" + b"a" * 65536 + b"\r\n") * 80)
        text = await closed(reader, BODY_SECONDS + HEADER_SECONDS + _SLACK)
        counts[status(text)] += 1
        hang_up(writer)

    await each(times, one)
    assert set(counts) <= {0, 408, 413}, tally(counts)
    return tally(counts)


async def pipelining(target: Target, times: int, _: random.Random) -> str:
    """Fifty requests in one write; the answers come in their order."""

    async def one(number: int) -> None:
        reader, writer = await target.open()
        names = [f"p{number}-{i}" for i in range(50)]
        body = json.dumps({"model": target.model, "prompt": "a", "max_tokens": 1}).encode()
        for name in names:
            writer.write(target.post("/v1/completions", body, f"X-Request-Id: {name}"))
        for name in names:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert status(head) == 200, head
            assert f"x-request-id: {name}\r\n".encode() in head.lower(), (name, head)
            size = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(size))
        hang_up(writer)

    await each(times, one)
    return f"{times} connections of 50 requests, all answered in order"


async def bodies(target: Target, times: int, rng: random.Random) -> str:
    """JSON that is broken, nested, huge or no text, to every endpoint that takes any."""
    paths = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"]
    paths += ["/tokenize", "/detokenize", "/score", "/rerank", "/pooling"]
    good = json.dumps(
        {"model": target.model, "prompt": "a", "max_tokens": 2, "messages": [], "input": "a"}
    ).encode()
    nasty = [
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800", "max_tokens": 1}',
        b'{"prompt": "a", "prompt": ["b"], "max_tokens": 1}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": -99999999999999999999999}',
        b'{"prompt": [1e400]}',
        b'{"messages": [{"role": "user", "content": [[[]]]}]}',
        b'{"messages": [{"role": "user", "content": "\\u0000\\ud83d"}], "max_tokens": 1}',
        b'{"prompt": "a", "stop": ["", "\\u0000"], "logit_bias": {"-1": 1}}',
        b'{"tokens": [-1, 99999999999999999999]}',
        b"\x00" * 100,
        b"\xef\xbb\xbf{}",
        b"NaN",
        b"",
    ]
    counts: Counter[int] = Counter()

    async def one(number: int) -> None:
        if number % 2:
            body = bytearray(good)
            for _ in range(rng.randrange(1, 5)):
                body[rng.randrange(len(body))] = rng.randrange(256)
        else:
            body = bytearray(nasty[number // 2 % len(nasty)])
        reader, writer = await target.open()
        writer.write(target.post(rng.choice(paths), bytes(body), "Connection: close"))
        text = await closed(reader, 30)
        counts[status(text)] += 1
        assert status(text) < 500, (bytes(body[:200]), text[:500])
        hang_up(writer)

    await each(times, one)
    assert 0 not in counts, tally(counts)
    return tally(counts)


async def ordinary(target: Target) -> float:
    """Seconds that an ordinary request takes."""
    start = time.perf_counter()
    reader, writer = await target.open()
    writer.write(target.completion(max_tokens=4))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert status(head) == 200, head
    hang_up(writer)
    return time.perf_counter() - start


ATTACKS: dict[str, tuple[int, Attack]] = {
    "slow loris: headers": (500, slow_headers),
    "slow loris: bodies": (200, slow_bodies),
    "half-open connections": (500, half_open),
    "streams that nobody reads": (10, deaf),
    "resets mid-stream": (1000, resets),
    "aborts": (10_000, aborts),
    "idle connections": (2000, idle),
    "garbage bytes": (1000, garbage),
    "huge headers": (200, huge_headers),
    "huge bodies": (100, huge_bodies),
    "pipelining": (40, pipelining),
    "broken JSON": (4000, bodies),
}
