"""/scale: another number of replicas, while the server serves.

vLLM's path and body for it, /scale_elastic_ep, are taken, too.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Protocol

import msgspec
from aiohttp import web
from msgspec import Meta

from ...actors.scaling import MOST_REPLICAS
from ...mq.errors import InvalidRequestError
from .protocol import sift

Replicas = Annotated[int, Meta(ge=1, le=MOST_REPLICAS)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """replicas: how many there are to be. drain_timeout: seconds that requests on a replica that
    goes have to end there, before they go on elsewhere; --shutdown-timeout by default."""

    replicas: Replicas
    drain_timeout: Seconds | None = None


class ElasticScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The same, as vLLM has it."""

    new_data_parallel_size: Replicas
    drain_timeout: Seconds | None = None


class ScaleAnswer(msgspec.Struct):
    """replicas: how many there are."""

    replicas: int
    message: str


class AskScale(Protocol):
    def __call__(self, replicas: int, drain_seconds: float | None = None) -> Awaitable[int]: ...


class ScaleApi:
    def __init__(self, ask: AskScale) -> None:
        self._ask = ask

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/scale", self.scale)
        app.router.add_post("/scale_elastic_ep", self.scale_elastic_ep)

    async def scale(self, request: web.Request) -> web.Response:
        """Another number of replicas; answered when there are so many."""
        asked = sift(await request.read(), ScaleRequest, {})
        return await self._scale("replicas", asked.replicas, asked.drain_timeout)

    async def scale_elastic_ep(self, request: web.Request) -> web.Response:
        """The same as /scale, as vLLM has it."""
        asked = sift(await request.read(), ElasticScaleRequest, {})
        field, replicas = "new_data_parallel_size", asked.new_data_parallel_size
        return await self._scale(field, replicas, asked.drain_timeout)

    async def _scale(self, field: str, replicas: int, drain_timeout: float | None) -> web.Response:
        try:
            number = await self._ask(replicas, drain_timeout)
        except InvalidRequestError as error:
            error.param = field
            raise
        answer = ScaleAnswer(number, f"Scaled to {number} data parallel engines")
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
