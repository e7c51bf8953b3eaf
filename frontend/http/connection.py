"""A client's connection, with the deadlines that keep slow and dead clients from holding it.

    state      begins with                          ends with            longest
    headers    the connection, or the first byte    its headers are in   header_timeout
               of a request after others
    busy       the headers of a request             its answer's end     -
    idle       the end of an answer                 the next byte        keep_alive_timeout

Beside that, whatever the state: from when the buffer of what is to be sent is full until it has run
low again, no more than max_client_lag. Who is late is cut off. A request that is under way ends by
that as if its client had hung up.

What waits for a client is bounded by this: it is one full buffer, and what its requests bring forth
in max_client_lag.

A connection that is lost has no deadline any more. Its request's handler may end after that, and a
deadline begun then would hold the connection, and all that hangs on it, in memory until it is over.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from aiohttp import web

from ...mq.server_config import ServerConfig

_log = logging.getLogger("ringcast.http")


class Connection(asyncio.Protocol):
    """Stands between a transport and aiohttp's protocol, to which it passes everything on.

    connections: where all are, by that protocol. It is there from when it is made, which one whose
    TLS handshake fails never is, until it is lost.
    """

    def __init__(
        self,
        inner: web.RequestHandler,
        server: ServerConfig,
        connections: dict[web.RequestHandler, Connection],
    ) -> None:
        self._inner = inner
        self._server = server
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._idle = False
        self._lost = False
        self._deadline: asyncio.TimerHandle | None = None
        self._lag: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """The headers of a request are in."""
        self._idle = False
        self._wait_at_most(None)

    def end(self) -> None:
        """Its answer has ended."""
        self._idle = True
        self._wait_at_most(self._server.keep_alive_timeout)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections[self._inner] = self
        self._wait_at_most(self._server.header_timeout)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._wait_at_most(None)
        self._stop_lag()
        self._inner.connection_lost(exc)
        del self._connections[self._inner]

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._idle = False
            self._wait_at_most(self._server.header_timeout)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        self._inner.eof_received()
        return None

    def pause_writing(self) -> None:
        self._lag = self._loop.call_later(self._server.max_client_lag, self._drop)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._stop_lag()
        self._inner.resume_writing()

    def _wait_at_most(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if seconds is not None and not self._lost:
            self._deadline = self._loop.call_later(seconds, self._expire)

    def _stop_lag(self) -> None:
        if self._lag is not None:
            self._lag.cancel()
            self._lag = None

    def _expire(self) -> None:
        self._transport.abort()

    def _drop(self) -> None:
        _log.warning(
            "%s is cut off: it has not read what was sent for %g s (--max-client-lag)",
            self._transport.get_extra_info("peername"),
            self._server.max_client_lag,
        )
        self._transport.abort()
