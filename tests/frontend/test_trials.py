"""Trials of suspects: of all API servers one at a time, so that innocent ones survive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from ringcast.frontend.client import EngineClient
from ringcast.frontend.handle import RequestHandle
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import EngineDeadError, PoisonousRequestError
from ringcast.mq.messages import Chunk, Chunks, Finish, TextPrompt
from ringcast.mq.sampling_params import SamplingParams
from ringcast.mq.tallies import TRIALS, Shape, Tallies

ENGINE = ["worker.0", "scheduler.0"]
SECONDS = 5.0


class Server:
    """An API server's client; what it has handed over can be waited for."""

    def __init__(self, spec: ModelSpec, tallies: Tallies, index: int) -> None:
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.client = EngineClient(
            spec, lambda to, message: self.sent.put_nowait(message), index, tallies=tallies
        )

    def submit(self) -> RequestHandle:
        handle = self.client.submit(TextPrompt("hi"), SamplingParams())
        self.sent.get_nowait()
        return handle

    def end(self, handle: RequestHandle) -> None:
        chunk = Chunk(
            handle.request_id,
            handle.request.incarnation,
            0,
            0,
            codec.pack([5]),
            finish=Finish("stop", 3, 1),
        )
        self.client.deliver("detokenizer.0", Chunks([chunk]))

    async def handed_over(self) -> str:
        async with asyncio.timeout(SECONDS):
            return (await self.sent.get()).request_id


@pytest.fixture
def owner() -> Iterator[Tallies]:
    tallies = Tallies.create(Shape(2))
    yield tallies
    tallies.close()


@pytest.fixture
def servers(owner: Tallies, spec: ModelSpec) -> list[Server]:
    return [Server(spec, Tallies.attach(owner.fd, Shape(2), i), i) for i in range(2)]


def die(servers: list[Server]) -> None:
    for server in servers:
        server.client.lost(ENGINE, "it died")
    for server in servers:
        server.client.regained(ENGINE)


async def test_an_innocent_one_waits_for_a_killer_of_another_server(servers: list[Server]) -> None:
    first, second = servers
    killer, innocent = first.submit(), second.submit()
    die(servers)
    assert await first.handed_over() == killer.request_id
    assert second.sent.empty()
    die(servers)
    with pytest.raises(PoisonousRequestError):
        await anext(killer)
    assert await second.handed_over() == innocent.request_id
    second.end(innocent)
    assert [chunk.finish.reason async for chunk in innocent if chunk.finish] == ["stop"]


async def test_the_next_trial_is_another_servers(servers: list[Server]) -> None:
    handles = [server.submit() for server in servers for _ in range(2)]
    die(servers)
    left = dict.fromkeys(handle.request_id for handle in handles)
    for server, handle in zip([servers[0]] * 2, handles[:2], strict=True):
        assert await server.handed_over() == handle.request_id
        assert servers[1].sent.empty()
        server.end(handle)
        del left[handle.request_id]
    for handle in handles[2:]:
        assert await servers[1].handed_over() == handle.request_id
        servers[1].end(handle)
        del left[handle.request_id]
    assert not left


async def test_a_dead_servers_trial_is_over(servers: list[Server], owner: Tallies) -> None:
    first, second = servers
    first.submit()
    waiting = second.submit()
    die(servers)
    assert owner.total(TRIALS) == 1
    assert second.sent.empty()
    owner.clear(0)
    assert await second.handed_over() == waiting.request_id
    assert owner.total(TRIALS) == 1
    second.end(waiting)
    assert owner.total(TRIALS) == 0


async def test_what_is_over_has_no_trial(servers: list[Server], owner: Tallies) -> None:
    first, _ = servers
    tried = first.submit()
    die(servers)
    assert owner.total(TRIALS) == 1
    first.client.fail_all(EngineDeadError("the end"))
    assert owner.total(TRIALS) == 0
    with pytest.raises(EngineDeadError):
        await anext(tried)
