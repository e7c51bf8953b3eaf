"""The API server actor: the shell of the HTTP application and of its ledger of requests."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from typing import Any

from ...actors import topology
from ...actors.base import Actor
from ...actors.boot import Boot
from ...actors.control import Control
from ...actors.profiling import ProfileAsks
from ...actors.scaling import ScaleAsks
from ...actors.status_asks import StatusAsks
from ...mq import supervision
from ...mq.errors import EngineDeadError
from ...mq.tallies import Shape, Tallies
from ..client import EngineClient
from ..metrics.recorder import Recorder
from ..metrics.request_spans import RequestSpans
from ..metrics.span_exporter import SpanExporter
from ..metrics.throughput import INTERVAL_SECONDS, Throughput
from . import trace_context
from .app import make_app
from .http_server import HttpServer
from .log import log_to_stderr

_log = logging.getLogger("ringcast.stats")


class ApiServer(Actor):
    """Accepts on the socket that the supervisor bound, once every other actor is ready."""

    def __init__(self, boot: Boot, control: Control) -> None:
        super().__init__(boot, control)
        self._http: HttpServer | None = None
        self._status = StatusAsks(control.send)
        self._profiles = ProfileAsks(control.send)
        self._scales = ScaleAsks(control.send)
        self._tasks: set[asyncio.Task[None]] = set()
        self._traces: SpanExporter | None = None

    def run(self) -> None:
        log_to_stderr()
        super().run()

    async def start(self) -> dict[str, str | int | float]:
        boot = self.boot
        assert boot.server is not None
        index = int(boot.actor.partition(".")[2])
        engine = boot.engine
        tallies = Tallies.attach(boot.tallies_fd, Shape.of(boot.server), index)
        self._client = EngineClient(
            boot.spec,
            self.links.send,
            index,
            engine.max_num_queued_reqs,
            None if engine.seed is None else engine.seed + index,
            engine.scheduling_policy,
            topology.num_engines(boot.counts),
            engine.data_parallel_routing,
            tallies,
            engine.tokenizer_count,
            engine.detokenizer_count,
            bool(engine.logits_processors),
        )
        self._client.observer = self._recorder = Recorder(tallies)
        if (endpoint := boot.server.otlp_traces_endpoint) is not None:
            self._traces = SpanExporter(endpoint)
            self._client.observer = RequestSpans(
                self._recorder, trace_context.current, self._traces.export
            )
        app = make_app(
            self._client,
            boot.spec,
            boot.server,
            self._status.ask,
            self._recorder,
            self._profiles.ask,
            self._scales.ask,
            tallies,
        )
        self._http = HttpServer(app, boot.server)
        return {}

    def on_batch(self, batch: list[tuple[str, Any]]) -> None:
        deliver = self._client.deliver
        for source, message in batch:
            deliver(source, message)

    def on_control(self, message: Any) -> None:
        match message:
            case supervision.TopologyReady():
                self._spawn(self._open_door())
            case supervision.BeginDrain(timeout=timeout):
                self._spawn(self._drain(timeout))
            case supervision.TopologyFailed(error=error, traceback=text):
                self._client.fail_all(EngineDeadError(error, text))
                self._spawn(self._drain(1.0))
            case supervision.Status():
                self._status.answered(message)
            case supervision.Profiled():
                self._profiles.answered(message)
            case supervision.Scaled():
                self._scales.answered(message)
            case supervision.PeersLeaving(names=names):
                self._client.leave(names, lambda: self.control.send(supervision.PeersLeft()))
            case _:
                super().on_control(message)

    def on_lost(self, message: supervision.PeersLost) -> None:
        if message.removed:
            self._client.removed(message.lost)
        else:
            self._client.lost(message.lost, message.error, message.from_outside)

    def on_back(self, names: list[str]) -> None:
        self._client.regained(names)

    def statistics(self) -> dict[str, float]:
        self._recorder.flush()  # for the scrapes of other API servers
        return self._client.statistics()

    def background(self) -> list[Coroutine[Any, Any, None]]:
        server, index = self.boot.server, self._client.index
        assert server is not None
        # Each API server would say the same of the one engine.
        quiet = server.disable_log_stats or index > 0
        return [*super().background(), *([] if quiet else [self._log_throughput()])]

    async def end(self) -> None:
        self._client.fail_all(EngineDeadError("the server is shutting down"))
        for asks in (self._status, self._profiles, self._scales):
            asks.fail("the server is shutting down")
        if self._http is not None:
            await self._http.close()
        if self._traces is not None:
            await self._traces.close()

    async def _open_door(self) -> None:
        assert self._http is not None
        address = await self._http.open(socket.socket(fileno=self.boot.listen_fd))
        self.control.send(supervision.Listening(address))

    async def _drain(self, timeout: float) -> None:
        """Refuse new requests, let those that run end, abort what is left at the deadline."""
        self._client.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._client.wait_idle()
        except TimeoutError:
            self._client.fail_all(EngineDeadError("the server is shutting down"))
        self.control.send(supervision.Drained())

    async def _log_throughput(self) -> None:
        throughput = Throughput()
        while True:
            if (line := throughput.line(await self._status.ask(), time.monotonic())) is not None:
                _log.info(line)
            await asyncio.sleep(INTERVAL_SECONDS)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.stop(error)
