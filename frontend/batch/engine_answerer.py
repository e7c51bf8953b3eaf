"""Answers a batch in an engine of this process's own, with the HTTP server's code but no HTTP."""

from __future__ import annotations

import logging
import uuid
from types import TracebackType

import msgspec
from aiohttp import web

from ...mq.errors import (
    EngineDeadError,
    OverloadedError,
    RequestFailedError,
    RingcastError,
    UnknownModelError,
)
from ...mq.server_config import ServerConfig
from ..async_llm import AsyncLLM
from ..http.errors import respond
from ..http.generation import Generation
from ..http.protocol import ChatRequest, CompletionRequest, read_request, sampling_params
from .lines import FORMS, BatchRequest, BatchResponse

_log = logging.getLogger("ringcast.batch")


class EngineAnswerer:
    """server: what requests may rely on; host, port and the like have no meaning here."""

    def __init__(self, engine: AsyncLLM, server: ServerConfig) -> None:
        self._engine = engine
        self._server = server

    async def answer(self, request: BatchRequest) -> BatchResponse:
        """See `Answerer`."""
        request_id = uuid.uuid4().hex
        try:
            response = await self._generate(request, request_id)
        except (EngineDeadError, OverloadedError):
            raise
        except RingcastError as error:
            response = respond(error)
        except Exception as error:  # as the server: one request's bug is not the others' end
            _log.exception("custom_id %r", request.custom_id)
            response = respond(RequestFailedError(f"{type(error).__name__}: {error}"))
        assert isinstance(response.body, bytes)
        return BatchResponse(response.status, request_id, msgspec.Raw(response.body))

    async def __aenter__(self) -> EngineAnswerer:
        await self._engine.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._engine.shutdown()

    async def _generate(self, request: BatchRequest, request_id: str) -> web.Response:
        spec = self._engine.spec
        form = FORMS[request.url]
        asked: ChatRequest | CompletionRequest
        parsers = None
        if form == "chat":
            asked = read_request(request.body, ChatRequest)
            parsers = asked.parsers(self._server)
        else:
            asked = read_request(request.body, CompletionRequest)
        model = self._served(asked.model)
        prompts = (
            [asked.chat_prompt()]
            if isinstance(asked, ChatRequest)
            else asked.prompts(spec.vocab_size)
        )
        params = sampling_params(asked, spec)
        with Generation(self._engine.client, form, request_id, model, parsers) as generation:
            generation.submit(prompts, params, asked)
            return await generation.answer({})

    def _served(self, name: str | None) -> str:
        names = self._server.served_model_name or [self._engine.spec.name]
        if name is None:
            return names[0]
        if name not in names:
            raise UnknownModelError(
                f"no model {name[:200]!r} here; this engine has {', '.join(names)} "
                "(--served-model-name gives it other names)",
                param="model",
            )
        return name
