"""What browsers are told of the pages that may use the server."""

from __future__ import annotations

from typing import Any

import pytest

from ringcast.mq.config import build
from ringcast.mq.errors import ConfigError
from ringcast.mq.server_config import ServerConfig

HERE, ELSEWHERE = "https://here.example", "https://elsewhere.example"
PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def preflight(server: Any, origin: str, method: str = "POST", asked: str = "") -> Any:
    headers = {"Origin": origin, "Access-Control-Request-Method": method}
    if asked:
        headers["Access-Control-Request-Headers"] = asked
    async with server.http.options(PATH, headers=headers) as answer:
        await answer.read()
        return answer.status, answer.headers


async def test_it_is_off_by_default(serve: Any) -> None:
    async with serve() as server:
        status, headers = await preflight(server, HERE)
        assert status == 405
        assert "Access-Control-Allow-Origin" not in headers
        async with server.http.get("/health", headers={"Origin": HERE}) as answer:
            assert not [name for name in answer.headers if name.startswith("Access-Control")]


async def test_a_preflight_needs_no_key(serve: Any) -> None:
    async with serve(allowed_origins=[HERE], api_key=["secret"]) as server:
        status, headers = await preflight(server, HERE, asked="authorization, content-type")
        assert status == 204
        assert headers["Access-Control-Allow-Origin"] == HERE
        assert "POST" in headers["Access-Control-Allow-Methods"]
        assert headers["Access-Control-Allow-Headers"] == "authorization, content-type"
        assert "Origin" in headers.getall("Vary")
        assert (await preflight(server, ELSEWHERE))[0] == 403


async def test_answers_and_refusals_and_streams_are_marked(serve: Any) -> None:
    async with serve(allowed_origins=[HERE]) as server:
        for body in (CHAT, {**CHAT, "stream": True}, {**CHAT, "no_such": 1}):
            for origin in (HERE, ELSEWHERE):
                headers = {"Origin": origin}
                async with server.http.post(PATH, json=body, headers=headers) as answer:
                    await answer.read()
                    allowed = answer.headers.get("Access-Control-Allow-Origin")
                    assert allowed == (HERE if origin == HERE else None)
                    assert answer.headers["Vary"] == "Origin"


async def test_without_a_key_a_page_can_read_why(serve: Any) -> None:
    headers = {"Origin": HERE}
    async with (
        serve(allowed_origins=[HERE], api_key=["secret"]) as server,
        server.http.post(PATH, json=CHAT, headers=headers) as answer,
    ):
        assert answer.status == 401
        assert answer.headers["Access-Control-Allow-Origin"] == HERE


async def test_any_origin(serve: Any) -> None:
    headers = {"Origin": ELSEWHERE}
    async with (
        serve(allowed_origins=["*"]) as server,
        server.http.get("/health", headers=headers) as answer,
    ):
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert "Vary" not in answer.headers
        assert "Access-Control-Allow-Credentials" not in answer.headers


async def test_methods_and_headers_and_credentials(serve: Any) -> None:
    options = {
        "allowed_origins": [HERE],
        "allowed_methods": ["POST"],
        "allowed_headers": ["Content-Type"],
        "allow_credentials": True,
    }
    async with serve(**options) as server:
        status, headers = await preflight(server, HERE, asked="content-type")
        assert (status, headers["Access-Control-Allow-Methods"]) == (204, "POST")
        assert headers["Access-Control-Allow-Credentials"] == "true"
        assert (await preflight(server, HERE, method="DELETE"))[0] == 403
        assert (await preflight(server, HERE, asked="content-type, x-other"))[0] == 403


@pytest.mark.parametrize("origins", [[], ["*"], [HERE, "*"]])
def test_credentials_of_any_page_are_refused(origins: list[str]) -> None:
    with pytest.raises(ConfigError, match="allowed_origins by name"):
        build(ServerConfig, {"allowed_origins": origins, "allow_credentials": True})
