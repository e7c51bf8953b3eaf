"""A request's id: what its client calls it in X-Request-Id, or else drawn. Every answer has it."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

from aiohttp import web

from ...mq.errors import InvalidRequestError
from .errors import Handler

HEADER = "X-Request-Id"
_VALID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
_current = ContextVar("request_id", default="-")  # each request is a task of its own


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get(HEADER)
    if given is None or _VALID.fullmatch(given) is None:
        given = uuid.uuid4().hex
    _current.set(given)
    return await handler(request)


async def mark(_: web.Request, response: web.StreamResponse) -> None:
    response.headers[HEADER] = current()


def current() -> str:
    """That of the request whose task this is."""
    return _current.get()


def check(request: web.Request) -> None:
    """Raise InvalidRequestError if what the client has given is no id."""
    given = request.headers.get(HEADER)
    if given is not None and given != current():
        raise InvalidRequestError(
            f"{HEADER} must be 1 to 128 letters, digits or any of _.:-", param=HEADER
        )
