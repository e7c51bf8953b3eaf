"""/v1/responses: OpenAI's Responses API, as far as it is text and keeps nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import msgspec
from aiohttp import web

from ...actors.text.parsers.output_parser import OutputParser
from ...actors.text.parsers.parser import Content, Delta
from ...mq.errors import InvalidRequestError, RingcastError
from ...mq.messages import Chunk, OutputSpec, ParserSpec
from ...mq.sampling_params import SamplingParams
from ...mq.server_config import ServerConfig
from ..client import EngineClient
from ..handle import RequestHandle
from . import request_id
from .response_object import Response, ResponseBuilder
from .response_request import ResponseRequest, read_response_request

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ResponsesApi:
    """The handler.

    served: the name of a model that a client may use, or an error.
    """

    def __init__(
        self,
        client: EngineClient,
        server: ServerConfig,
        served: Callable[[str | None], str],
    ) -> None:
        self._client = client
        self._served = served
        reasoning = server.reasoning_parser
        self._parsers = ParserSpec(reasoning=reasoning) if reasoning is not None else None

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/responses", self.create)

    async def create(self, request: web.Request) -> web.StreamResponse:
        """An answer to text or a list of messages (OpenAI's Responses API)."""
        asked = read_response_request(await request.read())
        request_id.check(request)
        name = request_id.current()
        headers = {request_id.HEADER: name}
        with self._begin(asked, name) as said:
            if asked.stream:
                return await _stream(request, said, headers)
            return await said.whole(headers)

    async def whole_response(self, body: bytes, name: str) -> web.Response:
        """See WholeAnswer."""
        with self._begin(read_response_request(body), name) as said:
            return await said.whole({})

    @contextlib.contextmanager
    def _begin(self, asked: ResponseRequest, name: str) -> Iterator[Said]:
        model = self._served(asked.model)
        params = asked.sampling_params(self._client.spec)
        builder = ResponseBuilder(_response(asked, f"resp_{name}", model, params))
        output = OutputSpec(
            client=self._client.index,
            # Only a stream of small chunks tells how many tokens were reasoning.
            delta=asked.stream or self._parsers is not None,
            parsers=self._parsers,
        )
        with self._client.submit(
            asked.chat_prompt(),
            params,
            output,
            cache_salt=asked.cache_salt,
            priority=asked.priority,
        ) as handle:
            yield Said(handle, builder, self._parsers)


class Said:
    """What a request's chunks say, given to the builder."""

    def __init__(
        self, handle: RequestHandle, builder: ResponseBuilder, parsers: ParserSpec | None
    ) -> None:
        self.handle = handle
        self.builder = builder
        self._parser = None if parsers is None else OutputParser(parsers, handle.request_id, 0)

    async def first(self) -> bytes:
        """The events that an answer begins with. Raises what the request is refused with."""
        events = b"".join(self.builder.begin())
        try:
            return events + self.take(await self.handle.mailbox.take())
        except InvalidRequestError as error:
            if error.param == "messages":
                error.param = "input"
            raise

    async def whole(self, headers: dict[str, str]) -> web.Response:
        """All of it at once. Raises whatever the request ends with."""
        await self.first()
        while chunks := await self.handle.mailbox.take():
            self.take(chunks)
        body = msgspec.json.encode(self.builder.response)
        return web.Response(body=body, content_type="application/json", headers=headers)

    def take(self, chunks: list[Chunk]) -> bytes:
        """The events of these chunks."""
        return b"".join([event for chunk in chunks for event in self._events(chunk)])

    def _events(self, chunk: Chunk) -> list[bytes]:
        parser, finish = self._parser, chunk.finish
        deltas: list[Delta] = [Content(chunk.text)]
        if parser is not None:
            deltas = parser.feed(chunk.text)
            deltas += parser.end() if finish is not None else []
        events = self.builder.add(deltas, len(chunk.token_ids) // 4)
        return events if finish is None else events + self.builder.end(finish)


async def _stream(request: web.Request, said: Said, headers: dict[str, str]) -> web.StreamResponse:
    first = await said.first()
    response = web.StreamResponse(headers={**_STREAM_HEADERS, **headers})
    await response.prepare(request)
    take = said.handle.mailbox.take
    try:
        await response.write(first)
        while chunks := await take():
            if events := said.take(chunks):
                await response.write(events)
    except RingcastError as error:
        await response.write(said.builder.fail(error))
    await response.write_eof()
    return response


def _response(asked: ResponseRequest, name: str, model: str, params: SamplingParams) -> Response:
    return Response(
        id=name,
        created_at=int(time.time()),
        model=model,
        temperature=params.temperature,
        top_p=params.top_p,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        metadata=asked.metadata,
        user=asked.user,
        parallel_tool_calls=asked.parallel_tool_calls,
    )
