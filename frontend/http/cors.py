"""CORS: which web pages a browser may let talk to this server. Off unless origins are allowed.

A browser asks before a page's request (the preflight) and reads in every answer whether the page
may see it. The server refuses nothing but preflights: what has no Origin comes from no page.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from ...mq.server_config import ServerConfig
from .errors import Handler, RefusedError

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
EXPOSED = "X-Request-Id, Retry-After"
MAX_AGE_SECONDS = 600  # that a browser keeps the answer to a preflight
_ASKS_METHOD = "Access-Control-Request-Method"
_ASKS_HEADERS = "Access-Control-Request-Headers"


class Cors:
    """A middleware for preflights, and a signal handler for all other answers, streams too."""

    def __init__(self, server: ServerConfig) -> None:
        self._origins = set(server.allowed_origins)
        self._any_origin = "*" in self._origins
        self._methods = _all_or(server.allowed_methods)
        self._headers = {name.lower() for name in _all_or(server.allowed_headers)}
        self._credentials = server.allow_credentials

    def add_to(self, app: web.Application) -> None:
        if self._origins:
            app.middlewares.append(self.answer_preflight)
            app.on_response_prepare.append(self.mark)

    @web.middleware
    async def answer_preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "OPTIONS" or not {"Origin", _ASKS_METHOD} <= request.headers.keys():
            return await handler(request)
        origin, method = request.headers["Origin"], request.headers[_ASKS_METHOD]
        if not self._lets_in(origin):
            raise _refused("pages of this origin")
        if self._methods and method not in self._methods:
            raise _refused(f"the method {method[:20]!r}")
        asked = request.headers.get(_ASKS_HEADERS, "")
        for name in filter(None, (part.strip() for part in asked.split(","))):
            if self._headers and name.lower() not in self._headers:
                raise _refused(f"the header {name[:80]!r}")
        headers = {
            "Access-Control-Allow-Methods": ", ".join(self._methods or METHODS),
            "Access-Control-Max-Age": str(MAX_AGE_SECONDS),
            "Vary": f"{_ASKS_METHOD}, {_ASKS_HEADERS}",
        }
        if asked:
            headers["Access-Control-Allow-Headers"] = asked
        return web.Response(status=204, headers=headers)

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Say in an answer whether the page that asked may see it."""
        headers, origin = response.headers, request.headers.get("Origin")
        if not self._any_origin:  # the answer is another one for other pages: caches must know
            headers.add("Vary", "Origin")
        if origin is None or not self._lets_in(origin):
            return
        headers["Access-Control-Allow-Origin"] = "*" if self._any_origin else origin
        headers["Access-Control-Expose-Headers"] = EXPOSED
        if self._credentials:
            headers["Access-Control-Allow-Credentials"] = "true"

    def _lets_in(self, origin: str) -> bool:
        return self._any_origin or origin in self._origins


def _all_or(names: Iterable[str]) -> list[str]:
    """The names; none if all are allowed."""
    names = list(names)
    return [] if "*" in names else names


def _refused(what: str) -> RefusedError:
    return RefusedError(f"{what} may not use this server (CORS)", status=403, code="cors_refused")
