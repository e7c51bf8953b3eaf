"""Whole answers: what a handler does where nothing is streamed, with HTTP or without."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from aiohttp import web

from . import request_id
from .errors import Handler

WholeAnswer = Callable[[bytes, str], Awaitable[web.Response]]
"""Of a request's body and id. Raises RingcastError."""


def over_http(answer: WholeAnswer) -> Handler:
    """A handler of requests that are never streamed."""

    @functools.wraps(answer)
    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(await request.read(), request_id.current())

    return handle
