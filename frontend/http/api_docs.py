"""/openapi.json, made of the routes and the structs behind them, and /docs, a page of it.

A body's schema says what its sieves let through (protocol.py): null for what needn't be there, the
fields that are dropped, and those that may have their neutral value alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import hdrs, web

from ... import __version__
from . import answers, protocol, response_request
from .access import OPEN
from .docs_page import PAGE
from .errors import ErrorResponse
from .load import ServerLoad
from .pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from .protocol import IGNORED, ChatRequest, CompletionRequest, StreamOptions
from .response_object import Response
from .response_request import ResponseRequest, ResponseStreamOptions
from .scale import ElasticScaleRequest, ScaleAnswer, ScaleRequest
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
    ("POST", "/pooling"): (EmbeddingRequest, answers.PooledList, None),
    ("POST", "/rerank"): (RerankRequest, answers.Ranking, None),
    ("POST", "/scale"): (ScaleRequest, ScaleAnswer, None),
    ("POST", "/scale_elastic_ep"): (ElasticScaleRequest, ScaleAnswer, None),
    ("POST", "/score"): (ScoreRequest, answers.ScoreList, None),
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
    ("POST", "/v1/embeddings"): (EmbeddingRequest, answers.EmbeddingList, None),
    ("POST", "/v1/rerank"): (RerankRequest, answers.Ranking, None),
    ("POST", "/v1/responses"): (ResponseRequest, Response, answers.ResponseEvent),
    ("POST", "/v1/score"): (ScoreRequest, answers.ScoreList, None),
    ("POST", "/v2/rerank"): (RerankRequest, answers.Ranking, None),
}
# Of what is read, the fields that can only be neutral; None where there is no such sieve.
_READ: dict[type[msgspec.Struct], Mapping[str, tuple[Any, ...]] | None] = {
    ChatRequest: protocol.UNSUPPORTED,
    CompletionRequest: protocol.UNSUPPORTED,
    DetokenizeRequest: protocol.UNSUPPORTED,
    EmbeddingRequest: {},
    ElasticScaleRequest: {},
    RerankRequest: {},
    ResponseRequest: response_request.UNSUPPORTED,
    ResponseStreamOptions: None,
    ScaleRequest: {},
    ScoreRequest: {},
    StreamOptions: None,
    TokenizeRequest: protocol.UNSUPPORTED,
}
_NO_EFFECT = "Accepted, as clients send it; it changes nothing"
_KEY = "key"
_SUMMARIES = {
    "/status": "The processes, the channels between them, and what they count",
    "/v1/models": "The names by which the model goes",
    "/v1/models/{model}": "One of these names",
    "/version": "The server's version",
}
_POLICY = (  # the page needs itself and /openapi.json
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
)


class DocsApi:
    """The handlers. keyed: whether clients need a key."""

    def __init__(self, keyed: bool) -> None:
        self._keyed = keyed
        self._openapi = b""

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/openapi.json", self.openapi)
        app.router.add_get("/docs", self.docs)

    async def openapi(self, request: web.Request) -> web.Response:
        """This server's API in OpenAPI's format."""
        if not self._openapi:
            self._openapi = msgspec.json.encode(describe(request.app, self._keyed))
        return web.Response(body=self._openapi, content_type="application/json")

    async def docs(self, _: web.Request) -> web.Response:
        """The same as a page to read."""
        headers = {"Content-Security-Policy": _POLICY}
        return web.Response(text=PAGE, content_type="text/html", headers=headers)


def describe(app: web.Application, keyed: bool) -> dict[str, Any]:
    """The OpenAPI document of all routes of the application."""
    kinds = [kind for types in TYPES.values() for kind in types if kind is not None]
    kinds.append(ErrorResponse)
    refs, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    for kind, neutral in _READ.items():
        _add_sieves(components[kind.__name__], neutral)
    schemas = dict(zip(kinds, refs, strict=True))
    paths: dict[str, Any] = {}
    for route in app.router.routes():
        if route.method == hdrs.METH_HEAD or route.resource is None:
            continue
        path = route.resource.canonical
        if path in PATHS:  # files for browsers
            continue
        operation = _operation(route, path, schemas)
        if keyed and path not in OPEN:
            operation["security"] = [{_KEY: []}]
        paths.setdefault(path, {})[route.method.lower()] = operation
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Ringcast", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": components},
    }
    if keyed:
        document["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    return document


def _add_sieves(schema: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]] | None) -> None:
    fields = schema["properties"]
    for name in fields.keys() - {*schema["required"]}:
        fields[name] = _or_null(fields[name])
    if neutral is None:
        return
    for name in sorted(neutral.keys() - fields.keys()):
        fields[name] = {"enum": [*_distinct(neutral[name]), None]}
    for name in sorted(IGNORED - fields.keys()):
        fields[name] = {"description": _NO_EFFECT}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    names: list[str] = ["default", "description"]
    kept = {name: schema[name] for name in names if name in schema}
    inner = {key: value for key, value in schema.items() if key not in kept}
    choices = inner.get("anyOf", [inner])
    null = {"type": "null"}
    if not inner or null in choices:
        return schema
    return {"anyOf": [*choices, null], **kept}


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Without 1.0 beside 1, which are one value in JSON schemas."""
    return [value for value in values if not isinstance(value, float) or not value.is_integer()]


def _operation(
    route: web.AbstractRoute, path: str, schemas: dict[Any, dict[str, Any]]
) -> dict[str, Any]:
    body, answer, event = TYPES.get((route.method, path), (None, None, None))
    good: dict[str, Any] = {"description": "Success"}
    if answer is not None:
        good["content"] = {"application/json": {"schema": schemas[answer]}}
    if event is not None:
        good["content"]["text/event-stream"] = {"schema": _event(event, schemas)}
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


def _event(kind: Any, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """One server-sent event. An error ends a stream that has begun."""
    said: dict[str, Any] = {"type": "string", "contentMediaType": "application/json"}
    if kind is answers.ResponseEvent:
        said["contentSchema"] = schemas[kind]  # an error is one of them
    else:
        said["contentSchema"] = {"anyOf": [schemas[kind], schemas[ErrorResponse]]}
        said = {"anyOf": [said, {"const": "[DONE]"}]}
    return {"type": "object", "required": ["data"], "properties": {"data": said}}


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0].rstrip(".")
