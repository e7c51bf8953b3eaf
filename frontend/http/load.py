"""/load: how busy the server is, as vLLM has it."""

from __future__ import annotations

import msgspec
from aiohttp import web

from ..client import EngineClient


class ServerLoad(msgspec.Struct):
    """server_load: requests that run or wait, of all API servers; each prompt is one."""

    server_load: int


class LoadApi:
    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/load", self.load)

    async def load(self, _: web.Request) -> web.Response:
        """How many requests run or wait."""
        body = msgspec.json.encode(ServerLoad(self._client.num_open_of_all))
        return web.Response(body=body, content_type="application/json")
