"""Answers a batch in an engine of this process's own, with the HTTP server's code but no HTTP."""

from __future__ import annotations

import logging
import uuid
from types import TracebackType

import msgspec

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
from .endpoints import ENDPOINTS, Apis
from .lines import BatchRequest, BatchResponse

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
            answer = ENDPOINTS[request.url](self._apis)
            response = await answer(request.body, request_id)
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
        self._apis = Apis(self._engine.client, self._server, self._served)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._engine.shutdown()

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
