"""The page at `/`: a live picture of the server, and a chat. Its plain files are in page/.

It holds no data, so it is open to everybody; what it shows it asks of the API, with a key where the
server has some. The policy lets a browser load these files, talk to this server, and nothing else.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from aiohttp import hdrs, web

KINDS = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
NAMES = (
    "index.html",
    "style.css",
    "icon.svg",
    "main.js",
    "api.js",
    "chat.js",
    "dom.js",
    "graph.js",
    "layout.js",
    "monitor.js",
    "rates.js",
    "tokens.js",
)
INDEX = "index.html"
PATHS = frozenset("/" if name == INDEX else f"/page/{name}" for name in NAMES)

_HEADERS = {
    "Cache-Control": "no-cache",  # asked for again each time, and answered with a 304
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WebPage:
    """The handlers, one route a file."""

    def add_routes(self, app: web.Application) -> None:
        folder = files(__package__).joinpath("page")
        for name in NAMES:
            page_file = _PageFile(name, folder.joinpath(name).read_bytes())
            path = "/" if name == INDEX else f"/page/{name}"
            app.router.add_get(path, page_file.serve)


class _PageFile:
    def __init__(self, name: str, body: bytes) -> None:
        self._body = body
        self._kind = KINDS[name.rpartition(".")[2]]
        self._tag = hashlib.sha256(body).hexdigest()[:32]

    async def serve(self, request: web.Request) -> web.Response:
        """A file of the page for people."""
        headers = {**_HEADERS, hdrs.ETAG: f'"{self._tag}"'}
        known = request.if_none_match or ()
        if any(tag.value in (self._tag, "*") for tag in known):
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=self._body, content_type=self._kind, charset="utf-8", headers=headers
        )
