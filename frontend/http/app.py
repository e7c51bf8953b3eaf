"""The HTTP application: routes and handlers. It knows the ledger of requests, and no channels."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from ... import __version__
from ...mq.config import ModelSpec
from ...mq.errors import UnknownModelError
from ...mq.messages import Message
from ...mq.server_config import ServerConfig
from ...mq.supervision import Status
from ...mq.tallies import Shape, Tallies
from ..client import EngineClient
from ..metrics.recorder import Recorder
from . import request_id, trace_context
from .access import Access
from .access_log import log_access
from .api_docs import DocsApi
from .body_limit import body_within
from .cors import Cors
from .errors import errors_as_json, respond
from .generation_api import GenerationApi
from .load import LoadApi
from .metrics import Metrics
from .pooling import PoolingApi
from .response_api import ResponsesApi
from .scale import AskScale, ScaleApi
from .tokenize import TokenizeApi
from .web_page import WebPage

READY_SECONDS = 5.0  # that a silent engine gets to answer /ready


def make_app(
    client: EngineClient,
    spec: ModelSpec,
    server: ServerConfig,
    status: Callable[[], Awaitable[Status]],
    recorder: Recorder,
    profile: Callable[[bool], Awaitable[str]] | None = None,
    scale: AskScale | None = None,
    tallies: Tallies | None = None,
) -> web.Application:
    """The application, to be run by an HttpServer.

    profile: starts the workers' profilers, or stops them and returns a report. scale: asks for
    another number of replicas. tallies: what several of these count together; without, this is the
    only one.
    """
    app = web.Application(client_max_size=server.max_body_bytes)
    add_middlewares(app, server, tallies or Tallies.local(Shape.of(server)))
    names = server.served_model_name or [spec.name]
    api = Api(client, spec, server, status)
    app.router.add_get("/metrics", Metrics(status, recorder, names[0]).scrape)
    app.router.add_get("/health", api.health)
    app.router.add_get("/ping", api.health)
    app.router.add_post("/ping", api.health)
    app.router.add_get("/ready", api.ready)
    app.router.add_get("/version", api.version)
    app.router.add_get("/status", api.status)
    app.router.add_post("/reset_prefix_cache", api.reset_prefix_cache)
    if profile is not None:
        profiles = Profiles(profile)
        app.router.add_post("/start_profile", profiles.start)
        app.router.add_post("/stop_profile", profiles.stop)
    if scale is not None:
        ScaleApi(scale).add_routes(app)
    app.router.add_get("/v1/models", api.models)
    app.router.add_get("/v1/models/{model:.+}", api.model)
    GenerationApi(client, server, api.served).add_routes(app)
    LoadApi(client).add_routes(app)
    TokenizeApi(client, api.served).add_routes(app)
    ResponsesApi(client, server, api.served).add_routes(app)
    DocsApi(keyed=bool(server.api_key)).add_routes(app)
    PoolingApi(client, spec, api.served).add_routes(app.router)
    if not server.disable_page:
        WebPage().add_routes(app)
    return app


def add_middlewares(app: web.Application, server: ServerConfig, tallies: Tallies) -> None:
    """What every request goes through, from the outermost on."""
    app.middlewares.append(request_id.identify)
    app.on_response_prepare.append(request_id.mark)
    if server.otlp_traces_endpoint is not None:
        app.middlewares.append(trace_context.note)
    if not server.disable_access_log:
        app.middlewares.append(log_access)
    app.middlewares.append(errors_as_json)
    Cors(server).add_to(app)
    app.middlewares.append(Access(server, tallies).guard)
    app.middlewares.append(body_within(server.body_timeout))


class Api:
    """The handlers."""

    def __init__(
        self,
        client: EngineClient,
        spec: ModelSpec,
        server: ServerConfig,
        status: Callable[[], Awaitable[Status]],
    ) -> None:
        self._client = client
        self._spec = spec
        self._names = server.served_model_name or [spec.name]
        self._status = status
        self._started = int(time.time())

    async def health(self, _: web.Request) -> web.Response:
        """Whether to leave this server running: it works, or will again by itself."""
        if self._client.dead is not None:
            return respond(self._client.dead, status=503)
        return web.Response()

    async def ready(self, _: web.Request) -> web.Response:
        """Whether to send it requests now."""
        trouble = await self._client.trouble(READY_SECONDS)
        return web.Response() if trouble is None else respond(trouble, status=503)

    async def version(self, _: web.Request) -> web.Response:
        return _json({"version": __version__})

    async def status(self, _: web.Request) -> web.Response:
        return _json(as_dict(await self._status()))

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """Answered when it is done: whatever is asked after that finds nothing of before."""
        await self._client.reset_prefix_cache()
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card(name) for name in self._names]})

    async def model(self, request: web.Request) -> web.Response:
        return _json(self._card(self.served(request.match_info["model"])))

    def served(self, name: str | None) -> str:
        """The name the client used, if it is one of this server's. None is the first of them."""
        if name is None:
            return self._names[0]
        if name not in self._names:
            raise UnknownModelError(
                f"no model {name[:200]!r} here; this server has {', '.join(self._names)}",
                param="model",
            )
        return name

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "ringcast",
            "root": self._spec.name,
            "parent": None,
            "max_model_len": self._spec.max_model_len,
        }


class Profiles:
    """Handlers of a server's profiles."""

    def __init__(self, profile: Callable[[bool], Awaitable[str]]) -> None:
        self._profile = profile

    async def start(self, _: web.Request) -> web.Response:
        """Answered when all workers record."""
        await self._profile(True)
        return web.Response()

    async def stop(self, _: web.Request) -> web.Response:
        """Answered when the traces are written: with a table of each, as text."""
        return web.Response(text=await self._profile(False) + "\n")


def as_dict(value: Any) -> Any:
    """A message as JSON objects with names. (On the wire between actors, messages are arrays.)"""
    if isinstance(value, Message):
        return {name: as_dict(field) for name, field in msgspec.structs.asdict(value).items()}
    if isinstance(value, list):
        return [as_dict(item) for item in value]
    return value


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
