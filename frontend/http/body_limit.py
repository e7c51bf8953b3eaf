"""The time that a client has for the body of its request, whoever reads it and however."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.typedefs import Middleware

from .errors import Handler, RefusedError


def body_within(seconds: float) -> Middleware:
    """A middleware that ends requests with a 408 whose body is not here after so long."""

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
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
