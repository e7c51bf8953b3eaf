"""Keys: who is let in, where, and how often."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ringcast.frontend.http.access import Keys, with_keys
from ringcast.mq.config import build
from ringcast.mq.errors import ConfigError
from ringcast.mq.server_config import ServerConfig

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(server: Any, headers: dict[str, str], path: str = PATH) -> tuple[int, Any, Any]:
    async with server.http.post(path, json=CHAT, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        bearer("secon"),
        bearer("first second"),
        {"Authorization": "first"},
        {"Authorization": "Basic first"},
    ],
)
async def test_without_a_key_of_the_servers(
    serve: Any, engine: Any, headers: dict[str, str]
) -> None:
    async with serve(api_key=["first", "second"]) as server:
        status, body, answered = await ask(server, headers)
    assert status == 401
    assert answered["WWW-Authenticate"] == "Bearer"
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert engine.sent == []


@pytest.mark.parametrize("key", ["first", "second", "third"])
async def test_any_of_several_keys(serve: Any, key: str) -> None:
    async with serve(api_key=["first", "second", "third"]) as server:
        assert (await ask(server, bearer(key)))[0] == 200
        assert (await ask(server, {"authorization": f"bearer  {key} "}))[0] == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/version", "/metrics"])
async def test_probes_need_no_key(serve: Any, path: str) -> None:
    async with serve(api_key=["first"]) as server, server.http.get(path) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/fake-model", "/status", "/health/", "//health", "/nothing"]
)
async def test_all_else_does(serve: Any, path: str) -> None:
    async with serve(api_key=["first"]) as server:
        async with server.http.get(server.url + path) as answer:
            assert answer.status == 401
        async with server.http.get(server.url + path, headers=bearer("first")) as answer:
            assert answer.status != 401
        async with server.http.post("/reset_prefix_cache") as answer:
            assert answer.status == 401


async def test_without_keys_anyone_may_ask(serve: Any) -> None:
    async with serve() as server:
        assert (await ask(server, {}))[0] == 200
        assert (await ask(server, bearer("none")))[0] == 200


async def test_concurrency_is_each_keys_own(serve: Any, engine: Any, until: Any) -> None:
    engine.hold = 1
    async with serve(api_key=["first", "second"], max_concurrency_per_key=2) as server:
        asked = [asyncio.create_task(ask(server, bearer("first"))) for _ in range(2)]
        await until(lambda: len(engine.generated) == 2)
        status, body, headers = await ask(server, bearer("first"))
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert body["error"]["code"] == "rate_limit_exceeded"
        assert headers["Retry-After"] == "1"
        async with server.http.get("/v1/models", headers=bearer("first")) as answer:
            assert answer.status == 200
        asked.append(asyncio.create_task(ask(server, bearer("second"))))
        await until(lambda: len(engine.generated) == 3)
        engine.hold = None
        assert [status for status, *_ in await asyncio.gather(*asked)] == [200] * 3
        assert (await ask(server, bearer("first")))[0] == 200


async def test_a_client_that_hung_up_leaves_its_place(serve: Any, engine: Any, until: Any) -> None:
    engine.hold = 1
    async with serve(api_key=["first"], max_concurrency_per_key=1) as server:
        asked = asyncio.create_task(ask(server, bearer("first")))
        await until(lambda: engine.generated)
        asked.cancel()
        await until(lambda: engine.aborted)
        engine.hold = None
        assert (await ask(server, bearer("first")))[0] == 200


async def test_requests_a_minute(serve: Any) -> None:
    async with serve(api_key=["first", "second"], max_requests_per_minute_per_key=2) as server:
        assert [(await ask(server, bearer("first")))[0] for _ in range(2)] == [200, 200]
        status, _, headers = await ask(server, bearer("first"))
        assert status == 429
        assert 50 < int(headers["Retry-After"]) <= 60
        assert (await ask(server, bearer("second")))[0] == 200


# --- where keys come from -------------------------------------------------------------------------


def test_keys_are_those_of_options_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\none\n two \n")
    server = ServerConfig(api_key=["zero"], api_key_file=str(file))
    with_all = with_keys(server, {"RINGCAST_API_KEY": "left over"})
    assert with_all.api_key == ["zero", "one", "two"]
    assert with_all.api_key_file is None


def test_the_variable_counts_where_there_is_no_option() -> None:
    environ = {"RINGCAST_API_KEY": "of-the-environment"}
    assert with_keys(ServerConfig(), environ).api_key == ["of-the-environment"]
    assert with_keys(ServerConfig(api_key=["mine"]), environ).api_key == ["mine"]
    assert with_keys(ServerConfig(), {"RINGCAST_API_KEY": ""}).api_key == []


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "line\nend"])
def test_what_cannot_be_a_key_is_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="visible ASCII") as caught:
        with_keys(ServerConfig(api_key=["good", key]), {})
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "# nothing\n"])
def test_a_file_without_keys(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        with_keys(ServerConfig(api_key_file=str(file)), {})


def test_limits_without_keys() -> None:
    with pytest.raises(ConfigError, match=r"max_concurrency_per_key = 3: .* --api-key"):
        with_keys(ServerConfig(max_concurrency_per_key=3), {})
    with pytest.raises(ConfigError, match="max_requests_per_minute_per_key"):
        build(ServerConfig, {"max_requests_per_minute_per_key": 0})


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """However early the right one comes: the time tells nothing."""
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return left == right

    monkeypatch.setattr("ringcast.frontend.http.access.hmac.compare_digest", compare)
    keys = Keys(["a", "b", "c"])
    assert keys.find("Bearer a") == 0
    assert keys.find("Bearer nothing") is None
    assert len(compared) == 6
