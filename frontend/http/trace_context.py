"""Where a request stands in its client's trace: the W3C's headers, as its task knows them."""

from __future__ import annotations

from contextvars import ContextVar

from aiohttp import web

from .errors import Handler

HEADERS = ("traceparent", "tracestate")
_current: ContextVar[dict[str, str] | None] = ContextVar("trace_context", default=None)


@web.middleware
async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
    headers = request.headers
    _current.set({name: headers[name] for name in HEADERS if name in headers})
    return await handler(request)


def current() -> dict[str, str]:
    """The headers of the request whose task this is, by name; empty where it has none."""
    return _current.get() or {}
