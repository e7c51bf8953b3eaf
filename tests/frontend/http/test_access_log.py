"""The log has a line for each request, and nothing in it that is not the log's business."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

LINE = re.compile(r'127\.0\.0\.1 "(\S+) (\S+)" (\d+) in \d+\.\d{3} s, id (\S+)')
PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "a secret of mine"}]}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "ringcast.access")

    def read() -> list[tuple[str, ...]]:
        found = [LINE.fullmatch(record.getMessage()) for record in caplog.records]
        return [match.groups() for match in found if match is not None]

    return read


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_for_each_request(
    serve: Any, lines: Any, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    async with serve(api_key=["the-key"]) as server:
        headers = {"Authorization": "Bearer the-key", "X-Request-Id": "mine-1"}
        url = PATH + "?api_key=the-key"
        async with server.http.post(
            url, json={**CHAT, "stream": stream}, headers=headers
        ) as answer:
            await answer.read()
            assert answer.headers["X-Request-Id"] == "mine-1"
    assert lines() == [("POST", PATH, "200", "mine-1")]
    for secret in ("the-key", "a secret of mine", "Hello"):
        assert secret not in caplog.text


async def test_refusals_have_one_too(serve: Any, lines: Any) -> None:
    async with serve(api_key=["the-key"]) as server:
        async with server.http.post(PATH, json=CHAT) as answer:
            drawn = answer.headers["X-Request-Id"]
        async with server.http.get("/a%0Ab/c", headers={"X-Request-Id": "bad id"}) as answer:
            other = answer.headers["X-Request-Id"]
    assert re.fullmatch("[0-9a-f]{32}", other)
    assert lines() == [("POST", PATH, "401", drawn), ("GET", "/a%0Ab/c", "401", other)]


async def test_a_watchers_questions_have_none(serve: Any, lines: Any) -> None:
    async with serve(api_key=["the-key"]) as server:
        for headers in ({"Authorization": "Bearer the-key"}, {}):
            async with server.http.get("/status", headers=headers) as answer:
                refused = answer.headers["X-Request-Id"]
    assert lines() == [("GET", "/status", "401", refused)]


async def test_a_client_that_hung_up(serve: Any, engine: Any, until: Any, lines: Any) -> None:
    engine.hold = 1
    async with serve() as server:
        asked = asyncio.create_task(server.http.post(PATH, json=CHAT))
        await until(lambda: engine.generated)
        asked.cancel()
        await until(lines)
    assert lines()[0][:3] == ("POST", PATH, "499")


async def test_it_can_be_off(serve: Any, lines: Any) -> None:
    async with serve(disable_access_log=True) as server, server.http.get("/health") as answer:
        assert answer.status == 200
    assert lines() == []


async def test_what_is_no_http_is_not_repeated(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ringcast")
    async with serve() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nAuthorization: Bearer secret\x00\r\n\r\n")
        assert b" 400 Bad Request" in await reader.read()
        writer.close()
    (record,) = caplog.records
    assert record.getMessage() == "127.0.0.1 sent what is no HTTP: BadHttpMessage"
    assert "secret" not in caplog.text
    assert record.levelno == logging.INFO
