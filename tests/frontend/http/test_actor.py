"""The API server's shell: what the supervisor tells it reaches the ledger."""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Iterator
from typing import Any

import pytest

from ringcast.frontend.http.actor import ApiServer
from ringcast.mq import messages, supervision
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.errors import EngineDeadError, OverloadedError
from ringcast.mq.sampling_params import SamplingParams
from ringcast.mq.server_config import ServerConfig
from ringcast.mq.tallies import REQUESTS, Shape, Tallies

PROMPT = messages.TextPrompt("hi")
ENGINE = ["worker.0", "scheduler.0"]
LOST = supervision.PeersLost(1, "worker.0", "worker.0 was killed", "", ENGINE)


class Said:
    """Stands in for the control connection and for the links: takes down what is sent."""

    def __init__(self) -> None:
        self.control: list[Any] = []
        self.links: list[Any] = []
        self.made: list[Tallies] = []

    def actor(
        self, spec: ModelSpec, name: str = "client.2", seed: int | None = None, **options: Any
    ) -> ApiServer:
        server = ServerConfig(api_server_count=3, **options)
        self.tallies = Tallies.create(Shape.of(server))
        self.made.append(self.tallies)
        boot = types.SimpleNamespace(
            counts={},
            actor=name,
            spec=spec,
            server=server,
            engine=EngineConfig(seed=seed),
            tallies_fd=self.tallies.fd,
        )
        actor = ApiServer(boot, types.SimpleNamespace(send=self.control.append))  # type: ignore[arg-type]
        actor.links = types.SimpleNamespace(  # type: ignore[assignment]
            send=lambda to, message: self.links.append(message),
            lose=lambda names: None,
            regain=lambda names: None,
        )
        return actor


@pytest.fixture
def said() -> Iterator[Said]:
    said = Said()
    yield said
    for tallies in said.made:
        tallies.close()


async def test_a_loss_and_a_return(said: Said, spec: ModelSpec) -> None:
    actor = said.actor(spec)
    await actor.start()
    handle = actor._client.submit(PROMPT, SamplingParams())
    actor.on_control(LOST)
    assert said.control == [supervision.PeersForgotten(1)]
    assert handle.parked
    assert len(said.links) == 1
    actor.on_control(supervision.PeersBack(ENGINE))
    assert [sent.incarnation for sent in said.links] == [0, 1]
    assert handle.request.output.client == 2
    assert said.tallies.total(REQUESTS) == 1
    await actor.end()
    assert said.tallies.total(REQUESTS) == 0


async def test_servers_with_one_seed_draw_others(said: Said, spec: ModelSpec) -> None:
    seeds = set()
    for name in ("client.0", "client.1"):
        actor = said.actor(spec, name, seed=7)
        await actor.start()
        seeds.add(actor._client.submit(PROMPT, SamplingParams()).request.params.seed)
        await actor.end()
    assert len(seeds) == 2


async def test_a_drain_during_a_restart_waits_for_the_takeover(said: Said, spec: ModelSpec) -> None:
    actor = said.actor(spec)
    await actor.start()
    handle = actor._client.submit(PROMPT, SamplingParams())
    actor.on_control(LOST)
    actor.on_control(supervision.BeginDrain(10.0))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="shutting down"):
        actor._client.submit(PROMPT, SamplingParams())
    actor.on_control(supervision.PeersBack(ENGINE))
    finish = messages.Finish("stop", 1, 0)
    chunk = messages.Chunk(handle.request_id, 1, 0, 0, b"", finish=finish)
    assert supervision.Drained() not in said.control
    actor.on_batch([("detokenizer.0", messages.Chunks([chunk]))])
    await asyncio.gather(*actor._tasks)
    assert said.control[-1] == supervision.Drained()
    await actor.end()


async def test_the_end_of_the_topology_fails_what_waits(said: Said, spec: ModelSpec) -> None:
    actor = said.actor(spec)
    await actor.start()
    handle = actor._client.submit(PROMPT, SamplingParams())
    actor.on_control(LOST)
    actor.on_control(supervision.TopologyFailed("worker.0", "worker.0 died too often", "boom"))
    with pytest.raises(EngineDeadError, match="died too often\nboom"):
        await anext(handle)
    await asyncio.gather(*actor._tasks)
    assert said.control[-1] == supervision.Drained()
    await actor.end()


def coroutines(actor: ApiServer) -> list[str]:
    work = actor.background()
    names = [coroutine.__name__ for coroutine in work]
    for coroutine in work:
        coroutine.close()
    return names


async def test_the_first_of_the_servers_logs_the_throughput(
    said: Said,
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    until: Any,
) -> None:
    caplog.set_level(logging.INFO, "ringcast")
    monkeypatch.setattr("ringcast.frontend.http.actor.INTERVAL_SECONDS", 0.001)
    actor = said.actor(spec, "client.0")
    await actor.start()
    assert "_log_throughput" in coroutines(actor)
    work = asyncio.create_task(actor._log_throughput())
    for generated in (0.0, 50.0):
        said.control.clear()
        await until(lambda: supervision.StatusRequest() in said.control)
        statistics = {"scheduler.0.generation_tokens": generated, "scheduler.0.running": 1.0}
        actor.on_control(supervision.Status([], [], statistics))
        await asyncio.sleep(0)
    await until(lambda: "running 1" in caplog.text)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await actor.end()


async def test_nobody_else_does(said: Said, spec: ModelSpec) -> None:
    for name, options in (("client.1", {}), ("client.0", {"disable_log_stats": True})):
        actor = said.actor(spec, name, **options)
        await actor.start()
        assert "_log_throughput" not in coroutines(actor)
        await actor.end()
