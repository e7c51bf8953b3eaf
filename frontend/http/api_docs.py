"""/openapi.json, made of the routes and the structs behind them, and /docs, a page of it."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from aiohttp import hdrs, web

from ... import __version__
from . import answers
from .docs_page import PAGE
from .errors import ErrorResponse
from .load import ServerLoad
from .pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from .protocol import ChatRequest, CompletionRequest
from .response_object import Response
from .response_request import ResponseRequest
from .tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from .web_page import PATHS

Types = tuple[Any, Any, Any]  # body, answer, event of a stream; None where there is none

# Of routes that aren't here, only path and summary are known.
TYPES: dict[tuple[str, str], Types] = {
    ("GET", "/load"): (None, ServerLoad, None),
    ("GET", "/status"): (None, answers.StatusAnswer, None),
    ("GET", "/v1/models"): (None, answers.ModelList, None),
    ("GET", "/v1/models/{model}"): (None, answers.ModelCard, None),
    ("GET", "/version"): (None, answers.Version, None),
    ("POST", "/detokenize"): (DetokenizeRequest, DetokenizeResponse, None),
    ("POST", "/pooling"): (EmbeddingRequest, None, None),
    ("POST", "/rerank"): (RerankRequest, None, None),
    ("POST", "/score"): (ScoreRequest, None, None),
    ("POST", "/tokenize"): (TokenizeRequest, TokenizeResponse, None),
    ("POST", "/v1/chat/completions"): (
        ChatRequest,
        answers.ChatCompletion,
        answers.ChatCompletionChunk,
    ),
    ("POST", "/v1/completions"): (
        CompletionRequest,
        answers.Completion,
        answers.CompletionChunk,
    ),
    ("POST", "/v1/embeddings"): (EmbeddingRequest, None, None),
    ("POST", "/v1/rerank"): (RerankRequest, None, None),
    ("POST", "/v1/responses"): (ResponseRequest, Response, answers.ResponseEvent),
    ("POST", "/v1/score"): (ScoreRequest, None, None),
    ("POST", "/v2/rerank"): (RerankRequest, None, None),
}
_SUMMARIES = {
    "/status": "The processes, the channels between them, and what they count",
    "/v1/chat/completions": "The assistant's next message of a chat",
    "/v1/completions": "How a text goes on",
    "/v1/models": "The names by which the model goes",
    "/v1/models/{model}": "One of these names",
    "/version": "The server's version",
}
_POLICY = (  # the page needs itself and /openapi.json
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
)


class DocsApi:
    """The handlers."""

    def __init__(self) -> None:
        self._openapi = b""

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/openapi.json", self.openapi)
        app.router.add_get("/docs", self.docs)

    async def openapi(self, request: web.Request) -> web.Response:
        """This server's API in OpenAPI's format."""
        if not self._openapi:
            self._openapi = msgspec.json.encode(describe(request.app))
        return web.Response(body=self._openapi, content_type="application/json")

    async def docs(self, _: web.Request) -> web.Response:
        """The same as a page to read."""
        headers = {"Content-Security-Policy": _POLICY}
        return web.Response(text=PAGE, content_type="text/html", headers=headers)


def describe(app: web.Application) -> dict[str, Any]:
    """The OpenAPI document of all routes of the application."""
    kinds = [kind for types in TYPES.values() for kind in types if kind is not None]
    kinds.append(ErrorResponse)
    refs, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(kinds, refs, strict=True))
    paths: dict[str, Any] = {}
    for route in app.router.routes():
        if route.method == hdrs.METH_HEAD or route.resource is None:
            continue
        path = route.resource.canonical
        if path in PATHS:  # files for browsers
            continue
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ringcast", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": components},
    }


def _operation(
    route: web.AbstractRoute, path: str, schemas: dict[Any, dict[str, Any]]
) -> dict[str, Any]:
    body, answer, event = TYPES.get((route.method, path), (None, None, None))
    good: dict[str, Any] = {"description": "Success"}
    if answer is not None:
        good["content"] = {"application/json": {"schema": schemas[answer]}}
    if event is not None:
        good["content"]["text/event-stream"] = {"schema": schemas[event]}
    error = {"application/json": {"schema": schemas[ErrorResponse]}}
    operation: dict[str, Any] = {
        "summary": _SUMMARIES.get(path) or _first_line(route.handler.__doc__),
        "responses": {
            "200": good,
            "4XX": {"description": "The request can't be served as asked", "content": error},
            "5XX": {"description": "The server can't serve it, or not now", "content": error},
        },
    }
    if body is not None:
        content = {"application/json": {"schema": schemas[body]}}
        operation["requestBody"] = {"required": True, "content": content}
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0].rstrip(".")
