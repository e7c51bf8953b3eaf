"""The handlers of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from aiohttp import web

from ...mq.messages import ParserSpec, Prompt
from ...mq.sampling_params import SamplingParams
from ...mq.server_config import ServerConfig
from ..client import EngineClient
from . import request_id
from .event_stream import WriteBatch
from .generation import Generation
from .protocol import ChatRequest, CompletionRequest, read_request, sampling_params
from .responses import Form


class Asked(NamedTuple):
    """What a body asks for."""

    form: Form
    request: CompletionRequest | ChatRequest
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    parsers: ParserSpec | None


class GenerationApi:
    """served: the name that a request's model is served by; raises UnknownModelError."""

    def __init__(
        self, client: EngineClient, server: ServerConfig, served: Callable[[str | None], str]
    ) -> None:
        self._client = client
        self._server = server
        self._served = served
        self._writes = WriteBatch()

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat_completions)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """How a text goes on."""
        return await self._respond(request, self._read_completion(await request.read()))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """The assistant's next message of a chat."""
        return await self._respond(request, self._read_chat(await request.read()))

    async def whole_completion(self, body: bytes, name: str) -> web.Response:
        """See WholeAnswer."""
        with self._begin(self._read_completion(body), name) as generation:
            return await generation.answer({})

    async def whole_chat(self, body: bytes, name: str) -> web.Response:
        """Likewise."""
        with self._begin(self._read_chat(body), name) as generation:
            return await generation.answer({})

    def _read_completion(self, body: bytes) -> Asked:
        request = read_request(body, CompletionRequest)
        model, spec = self._served(request.model), self._client.spec
        prompts, params = request.prompts(spec.vocab_size), sampling_params(request, spec)
        return Asked("completion", request, model, prompts, params, None)

    def _read_chat(self, body: bytes) -> Asked:
        request = read_request(body, ChatRequest)
        model = self._served(request.model)
        prompts: list[Prompt] = [request.chat_prompt()]
        params, parsers = sampling_params(request, self._client.spec), request.parsers(self._server)
        return Asked("chat", request, model, prompts, params, parsers)

    async def _respond(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        request_id.check(request)
        name = request_id.current()
        headers = {request_id.HEADER: name}
        with self._begin(asked, name) as generation:
            if asked.request.stream:
                usage = asked.request.include_usage
                return await generation.stream(request, usage, headers, self._writes)
            return await generation.answer(headers)

    @contextlib.contextmanager
    def _begin(self, asked: Asked, name: str) -> Iterator[Generation]:
        client, parsers = self._client, asked.parsers
        with Generation(client, asked.form, name, asked.model, parsers) as generation:
            generation.submit(asked.prompts, asked.params, asked.request)
            yield generation
