"""Errors as HTTP clients see them: OpenAI's JSON shape, whatever went wrong and wherever."""

from __future__ import annotations

import http
import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from ...mq.errors import InvalidRequestError, OverloadedError, RingcastError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger("ringcast.http")


class RefusedError(RingcastError):
    """This server doesn't do it, whatever the engine could: no key, too many requests, too slow.

    headers: that the answer must have.
    """

    def __init__(
        self, message: str, *, status: int, code: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct):
    error: ErrorBody


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Make every error before the first byte of a response a JSON one."""
    try:
        return await handler(request)
    except RingcastError as error:
        return respond(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _respond(error.status, _http_error(request, error), _kept_headers(error))
    except ConnectionError:
        raise  # the client has gone: there is nobody to answer
    except Exception as error:
        _log.exception("%s %s", request.method, request.path)
        reason = f"{type(error).__name__}: {error}"
        return _respond(500, ErrorBody(reason, "internal_server_error", code=500))


def respond(error: RingcastError, status: int | None = None) -> web.Response:
    headers = dict(error.headers) if isinstance(error, RefusedError) else {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    return _respond(status or status_of(error), body_of(error), headers)


def status_of(error: RingcastError) -> int:
    return int(getattr(error, "status", 500))


def body_of(error: RingcastError) -> ErrorBody:
    status = status_of(error)
    if isinstance(error, InvalidRequestError):
        return ErrorBody(str(error), _type_of(status), error.param, error.code or status)
    code = error.code if isinstance(error, RefusedError) else status
    return ErrorBody(str(error), _type_of(status), code=code)


def event_of(error: RingcastError) -> bytes:
    """The error as the last server-sent event of a stream."""
    return b"data: %b\n\n" % msgspec.json.encode(ErrorResponse(body_of(error)))


def _type_of(status: int) -> str:
    if status == 404:
        return "not_found_error"
    if status == 429:
        return "rate_limit_error"
    if status == 503:
        return "overloaded_error"
    return "invalid_request_error" if status < 500 else "internal_server_error"


def _http_error(request: web.Request, error: web.HTTPException) -> ErrorBody:
    message = error.text or error.reason
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {allowed}, not {request.method}"
    elif isinstance(error, web.HTTPNotFound):
        message = f"there is nothing at {request.path}"
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message = (
            f"the body is larger than {request.client_max_size} bytes, the most this server takes"
        )
    return ErrorBody(message, _type_of(error.status), code=error.status)


def _kept_headers(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


def _respond(status: int, body: ErrorBody, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status,
        reason=http.HTTPStatus(status).phrase,
        body=msgspec.json.encode(ErrorResponse(body)),
        headers=headers,
        content_type="application/json",
    )
