"""What is left in memory of requests and connections, for the tests that ask."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import pytest
from aiohttp import web

from ringcast.frontend.handle import RequestHandle
from ringcast.frontend.http.connection import Connection
from ringcast.frontend.http.event_stream import EventStream
from ringcast.frontend.http.generation import Generation

_KINDS = (
    Connection,
    EventStream,
    Generation,
    RequestHandle,
    web.BaseRequest,
    web.RequestHandler,
    web.StreamResponse,
)


@pytest.fixture
def alive() -> Callable[[], Counter[str]]:
    """How many objects there are of each kind that a request or its connection has."""

    def count() -> Counter[str]:
        gc.collect()
        # By type: to ask an object for its class can make it warn, as torch's deprecated ones do.
        kept = [item for item in gc.get_objects() if issubclass(type(item), _KINDS)]
        return Counter(type(item).__name__ for item in kept)

    return count
