"""The HTTP application on a socket: its connections with their deadlines, TLS, its end."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from ...mq.server_config import ServerConfig
from .connection import Connection
from .errors import Handler
from .log import connection_logger
from .tls import make_context

LAST_BYTES_SECONDS = 1.0  # that slow clients get to read the end of their answers at the end
LINGERING_SECONDS = 2.0  # that are given to a body nobody wants, so that its sender reads why


class HttpServer:
    """Make it, `open`, and `close`."""

    def __init__(self, app: web.Application, server: ServerConfig) -> None:
        """Raises ConfigError for certificates that can't be used."""
        self._config = server
        self._tls = make_context(server)
        self._connections: dict[web.RequestHandler, Connection] = {}
        self._acceptor: asyncio.Server | None = None
        app.middlewares.insert(0, self._track)
        # Hanging up cancels the handler, and with it its requests in the engine.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,  # coded bodies are refused (body_limit.py)
            access_log=None,
            logger=connection_logger(),
            lingering_time=LINGERING_SECONDS,
            shutdown_timeout=LAST_BYTES_SECONDS,
        )

    async def open(self, listener: socket.socket) -> str:
        """Accept on a listening socket from now on. Returns the address."""
        await self._runner.setup()
        self._acceptor = await asyncio.get_running_loop().create_server(
            self._connect,
            sock=listener,
            ssl=self._tls,
            ssl_handshake_timeout=self._config.header_timeout if self._tls else None,
            backlog=1024,
        )
        host, port = listener.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await self._runner.cleanup()

    def _connect(self) -> Connection:
        assert self._runner.server is not None
        return Connection(self._runner.server(), self._config, self._connections)

    @web.middleware
    async def _track(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = self._connections[request.protocol]
        connection.begin()
        try:
            return await handler(request)
        except ConnectionError:
            transport = request.transport
            if transport is not None and not transport.is_closing():
                raise
            return web.Response()  # for nobody: aiohttp would log that they left as an error
        finally:
            connection.end()
