"""Answers a batch on a running server, ours or any that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import uuid
from types import TracebackType

import aiohttp
import msgspec

from ...mq.errors import EngineDeadError, OverloadedError
from ..cli.remote import RemoteServer, key_headers
from ..http.errors import ErrorBody, ErrorResponse
from .lines import BatchRequest, BatchResponse

_CONNECT_SECONDS = 10.0
_PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between attempts to reach a server that has been there: it may be started again."""

_TRY_LATER = (429, 503)
_LONGEST_WAIT = 60.0  # seconds, whatever Retry-After says


class ServerAnswerer:
    """url: with or without /v1. limit: connections at a time."""

    def __init__(self, url: str, limit: int) -> None:
        self._server = RemoteServer(url)
        self._limit = limit
        self._session: aiohttp.ClientSession | None = None

    async def answer(self, request: BatchRequest) -> BatchResponse:
        """See `Answerer`."""
        for pause in _PAUSES:
            try:
                return await self._post(request)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError):
                await asyncio.sleep(pause)
        try:
            return await self._post(request)
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise EngineDeadError(
                f"the server at {self._server.url} answers no more: {reason}"
            ) from None

    async def __aenter__(self) -> ServerAnswerer:
        try:
            await self._server.get("/v1/models")  # says so where there is no server
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._limit),
                headers=key_headers(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            )
        finally:
            await self._server.close()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def _post(self, request: BatchRequest) -> BatchResponse:
        assert self._session is not None
        url = self._server.url + request.url
        headers = {"Content-Type": "application/json"}
        async with self._session.post(url, data=request.body, headers=headers) as answer:
            body = _one_line(await answer.read(), answer)
            if answer.status in _TRY_LATER:
                raise OverloadedError(_message(body), _retry_after(answer))
            request_id = answer.headers.get("X-Request-Id") or uuid.uuid4().hex
            return BatchResponse(answer.status, request_id, msgspec.Raw(body))


class _Failure(msgspec.Struct):
    error: ErrorBody


def _one_line(body: bytes, answer: aiohttp.ClientResponse) -> bytes:
    """JSON without line breaks, also of what is no JSON, such as a proxy's page."""
    try:
        return msgspec.json.format(body, indent=-1)
    except msgspec.DecodeError:
        text = body[:500].decode(errors="replace")
        error = ErrorBody(f"no JSON came: {text}", "invalid_response", code=answer.status)
        return msgspec.json.encode(ErrorResponse(error))


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Failure).error.message
    except msgspec.ValidationError:
        return "the server is overloaded"


def _retry_after(answer: aiohttp.ClientResponse) -> float:
    given = answer.headers.get("Retry-After", "")
    return min(float(given), _LONGEST_WAIT) if given.isdecimal() and given.isascii() else 1.0
