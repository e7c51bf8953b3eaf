"""/scale: another number of replicas, while the server serves.

vLLM's path and body for it, /scale_elastic_ep, are taken, too.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from ...mq.errors import InvalidRequestError

T = TypeVar("T", bound=msgspec.Struct)
Seconds = Annotated[float, Meta(ge=0, le=86400)]


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """replicas: how many there are to be. drain_timeout: seconds that requests on a replica that
    goes have to end there, before they go on elsewhere; --shutdown-timeout by default."""

    replicas: int
    drain_timeout: Seconds | None = None


class ElasticScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The same, as vLLM has it."""

    new_data_parallel_size: int
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
        asked = _read(await request.read(), ScaleRequest)
        return await self._scale(asked.replicas, asked.drain_timeout)

    async def scale_elastic_ep(self, request: web.Request) -> web.Response:
        """The same as /scale, as vLLM has it."""
        asked = _read(await request.read(), ElasticScaleRequest)
        return await self._scale(asked.new_data_parallel_size, asked.drain_timeout)

    async def _scale(self, replicas: int, drain_timeout: float | None) -> web.Response:
        number = await self._ask(replicas, drain_timeout)
        answer = ScaleAnswer(number, f"Scaled to {number} data parallel engines")
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def _read(body: bytes, kind: type[T]) -> T:
    """Raises InvalidRequestError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is no {kind.__name__}: {error}") from None
