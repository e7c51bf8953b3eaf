"""A running server, as the commands with --url talk to it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from ...mq.errors import ConfigError, InvalidRequestError, RequestFailedError, RingcastError
from ..http.access import VARIABLE

DEFAULT_URL = "http://127.0.0.1:8000"
_EVENT = b"data: "
_DONE = b"[DONE]"


class RemoteServer:
    """Use it as an async context manager, on one event loop. The key is that of RINGCAST_API_KEY.

    Everything raises ConfigError where no server answers, InvalidRequestError for what the server
    refuses, and RequestFailedError for what fails there.
    """

    def __init__(self, url: str, connect_timeout: float = 5.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout)
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> Any:
        """The JSON at a path."""
        try:
            async with self._open().get(self.url + path) as answer:
                return await _read(answer)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise self._unreachable(error) from None

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that answers a body."""
        try:
            async with self._open().post(self.url + path, json=body) as answer:
                return await _read(answer)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise self._unreachable(error) from None

    async def model(self) -> str:
        """The first of the names that the server has for its model."""
        name: str = (await self.get("/v1/models"))["data"][0]["id"]
        return name

    async def chat(
        self, model: str, messages: list[dict[str, Any]], sampling: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer; the last has the usage."""
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
        try:
            path = "/v1/chat/completions"
            async with self._open().post(self.url + path, json=body) as answer:
                if answer.status != 200:
                    await _read(answer)
                async for line in answer.content:
                    if not line.startswith(_EVENT) or line.strip().endswith(_DONE):
                        continue
                    event = msgspec.json.decode(line.removeprefix(_EVENT))
                    if "error" in event:
                        raise RequestFailedError(event["error"]["message"])
                    yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> RemoteServer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, headers=key_headers())
        return self._session

    def _unreachable(self, error: Exception) -> RingcastError:
        reason = str(error) or type(error).__name__
        return ConfigError(
            f"url = {self.url!r}: no server answers there ({reason}); `ringcast serve` starts one"
        )


def key_headers() -> dict[str, str]:
    """What shows the key of RINGCAST_API_KEY, if there is one."""
    key = os.environ.get(VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _read(answer: aiohttp.ClientResponse) -> Any:
    body = msgspec.json.decode(await answer.read())
    if answer.status < 400:
        return body
    message = body["error"]["message"]
    if answer.status < 500:
        raise InvalidRequestError(message)
    raise RequestFailedError(message)
