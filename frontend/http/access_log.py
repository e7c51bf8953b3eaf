"""A line in the log for each request: who asked for what, how it ended, how long it took.

No query, no header and no body is ever in it: those may hold keys and what users write. A status
that was given has none: whoever watches the server (the page at /, `ringcast top`) asks for one
each second.
"""

from __future__ import annotations

import logging
import time

from aiohttp import web

from . import request_id
from .errors import Handler

HUNG_UP = 499  # nginx's number for a client that didn't wait for the end of its answer
_PATH_LENGTH = 200
_WATCHED = "/status"

_log = logging.getLogger("ringcast.access")


@web.middleware
async def log_access(request: web.Request, handler: Handler) -> web.StreamResponse:
    start, status = time.monotonic(), HUNG_UP
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as answer:
        status = answer.status
        raise
    finally:
        if request.path != _WATCHED or status != 200:
            _log_line(request, status, time.monotonic() - start)


def _log_line(request: web.Request, status: int, seconds: float) -> None:
    _log.info(
        '%s "%s %s" %d in %.3f s, id %s',
        request.remote,
        request.method,
        request.rel_url.raw_path[:_PATH_LENGTH],  # as it came: no line ends can be in it
        status,
        seconds,
        request_id.current(),
    )
