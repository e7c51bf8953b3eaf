"""What every body must be: here within some time, whoever reads it and however; and not coded.

A coded one (gzip, say) would have to be unpacked before anything about it is known. No client that
was tried sends one.
"""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.typedefs import Middleware

from .errors import Handler, RefusedError


def body_within(seconds: float) -> Middleware:
    """A middleware that ends requests with a 408 whose body is not here after so long, and with a
    415 those whose body is coded."""

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RefusedError(
                "this server takes bodies as they are, without Content-Encoding",
                status=415,
                code="unsupported_content_encoding",
                headers={"Accept-Encoding": "identity"},
            )
        body = request.content
        if body.is_eof():
            return await handler(request)
        try:
            async with asyncio.timeout(seconds) as deadline:
                body.on_eof(lambda: _lift(deadline))
                return await handler(request)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise RefusedError(
                f"the request's body has not arrived within {seconds:g} s",
                status=408,
                code="request_timeout",
            ) from None

    return limit


def _lift(deadline: asyncio.Timeout) -> None:
    try:
        deadline.reschedule(None)
    except RuntimeError:  # the answer was there before the body's end, or the deadline was
        return
