"""The handler of /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from ...mq.supervision import Status
from ..metrics.exposition import render
from ..metrics.recorder import Recorder


class Metrics:
    def __init__(
        self, status: Callable[[], Awaitable[Status]], recorder: Recorder, model: str
    ) -> None:
        self._status = status
        self._recorder = recorder
        self._model = model

    async def scrape(self, request: web.Request) -> web.Response:
        """What Prometheus collects, in its text format: of all API servers, whichever is asked."""
        accept = request.headers.get("Accept")
        body, kind = render(await self._status(), self._recorder.of_all(), self._model, accept)
        return web.Response(body=body, headers={"Content-Type": kind})
