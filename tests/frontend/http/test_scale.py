"""/scale: what is asked of the supervisor, and what becomes of its answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from ringcast.actors.scaling import ScaleAsks
from ringcast.frontend.client import EngineClient
from ringcast.frontend.http.app import make_app
from ringcast.frontend.metrics.recorder import Recorder
from ringcast.mq import supervision
from ringcast.mq.config import ModelSpec, build
from ringcast.mq.server_config import ServerConfig
from ringcast.mq.supervision import Scale, Scaled


class Supervisor:
    """Answers each Scale at once, with what it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []
        self.answer: tuple[int, str, int] = (3, "", 200)
        self.asks = ScaleAsks(self._send)

    def _send(self, message: Any) -> None:
        assert isinstance(message, Scale)
        self.asked.append((message.replicas, message.drain_seconds))
        self.asks.answered(Scaled(message.ask, *self.answer))


@contextlib.asynccontextmanager
async def serving(
    client: EngineClient, spec: ModelSpec, supervisor: Supervisor, **options: Any
) -> AsyncIterator[TestClient[Any, Any]]:
    async def status() -> supervision.Status:
        statistics = {"supervisor.replicas": 3.0}
        return supervision.Status([], [], statistics)

    config = build(ServerConfig, options)
    app = make_app(client, spec, config, status, Recorder(), scale=supervisor.asks.ask)
    async with TestClient(TestServer(app)) as http:
        yield http


async def test_it_is_asked_and_answered(client: EngineClient, spec: ModelSpec) -> None:
    supervisor = Supervisor()
    async with serving(client, spec, supervisor) as http:
        bodies: list[tuple[str, dict[str, float]]] = [
            ("/scale", {"replicas": 3}),
            ("/scale", {"replicas": 3, "drain_timeout": 0}),
            ("/scale_elastic_ep", {"new_data_parallel_size": 3, "drain_timeout": 2.5}),
        ]
        for path, body in bodies:
            async with http.post(path, json=body) as answer:
                assert answer.status == 200
                assert await answer.json() == {
                    "replicas": 3,
                    "message": "Scaled to 3 data parallel engines",
                }
    assert supervisor.asked == [(3, -1.0), (3, 0.0), (3, 2.5)]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, "must be 1 to 64"),
        (409, "must be 1 to 64"),
        (500, "must be 1 to 64; replicas, as before: 1"),
        (503, "must be 1 to 64"),
    ],
)
async def test_a_refusal_has_its_reason_and_status(
    client: EngineClient, spec: ModelSpec, status: int, words: str
) -> None:
    supervisor = Supervisor()
    supervisor.answer = (1, "must be 1 to 64", status)
    async with (
        serving(client, spec, supervisor) as http,
        http.post("/scale", json={"replicas": 0}) as answer,
    ):
        assert answer.status == status
        assert (await answer.json())["error"]["message"] == words


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"replicas": "2"}',
        b'{"replicas": 2.5}',
        b'{"replicas": 2, "drain_timeout": -1}',
        b'{"replicas": 2, "new_data_parallel_size": 2}',
    ],
)
async def test_a_body_that_says_something_else_asks_nobody(
    client: EngineClient, spec: ModelSpec, body: bytes
) -> None:
    supervisor = Supervisor()
    async with serving(client, spec, supervisor) as http, http.post("/scale", data=body) as answer:
        assert answer.status == 400
        assert "ScaleRequest" in (await answer.json())["error"]["message"]
    assert supervisor.asked == []


async def test_it_wants_a_key_where_there_are_keys(client: EngineClient, spec: ModelSpec) -> None:
    supervisor = Supervisor()
    async with serving(client, spec, supervisor, api_key=["one"]) as http:
        async with http.post("/scale", json={"replicas": 3}) as answer:
            assert answer.status == 401
        assert supervisor.asked == []
        headers = {"Authorization": "Bearer one"}
        async with http.post("/scale", json={"replicas": 3}, headers=headers) as answer:
            assert answer.status == 200


async def test_the_number_is_among_the_metrics(client: EngineClient, spec: ModelSpec) -> None:
    async with serving(client, spec, Supervisor()) as http, http.get("/metrics") as answer:
        assert f'ringcast:replicas{{model_name="{spec.name}"}} 3.0' in await answer.text()
