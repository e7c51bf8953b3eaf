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

FIELDS = {"/scale": "replicas", "/scale_elastic_ep": "new_data_parallel_size"}


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
        bodies: list[tuple[str, dict[str, float | None]]] = [
            ("/scale", {"replicas": 3, "drain_timeout": None, "unknown": None}),
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
        (400, "there are 2 devices"),
        (409, "there are 2 devices"),
        (500, "there are 2 devices; replicas, as before: 1"),
        (503, "there are 2 devices"),
    ],
)
async def test_a_refusal_has_its_reason_and_status(
    client: EngineClient, spec: ModelSpec, status: int, words: str
) -> None:
    supervisor = Supervisor()
    supervisor.answer = (1, "there are 2 devices", status)
    async with serving(client, spec, supervisor) as http:
        for path, field in FIELDS.items():
            async with http.post(path, json={field: 3}) as answer:
                assert answer.status == status
                error = (await answer.json())["error"]
                assert error["message"] == words
                assert error["param"] == (field if status < 500 else None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "replicas"),
        ({"replicas": None}, "replicas"),
        ({"replicas": "2"}, "replicas"),
        ({"replicas": 2.5}, "replicas"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 65}, "replicas"),
        ({"replicas": 2, "drain_timeout": -1}, "drain_timeout"),
        ({"replicas": 2, "other": 2}, "other"),
    ],
)
async def test_a_body_that_says_something_else_asks_nobody(
    client: EngineClient, spec: ModelSpec, fields: dict[str, Any], param: str
) -> None:
    supervisor = Supervisor()
    async with serving(client, spec, supervisor) as http:
        for path, field in FIELDS.items():
            body = {field if name == "replicas" else name: fields[name] for name in fields}
            async with http.post(path, json=body) as answer:
                assert answer.status == 400
                named = (await answer.json())["error"]["param"]
            assert named == (field if param == "replicas" else param)
        async with http.post("/scale", data=b"") as answer:
            assert answer.status == 400
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
