"""What a batch can ask, by url: each is the HTTP server's own code for whole answers."""

from __future__ import annotations

from collections.abc import Callable

from ...mq.server_config import ServerConfig
from ..client import EngineClient
from ..http.generation_api import GenerationApi
from ..http.pooling import PoolingApi
from ..http.response_api import ResponsesApi
from ..http.whole_answer import WholeAnswer


class Apis:
    """served: the name that a request's model is served by; raises UnknownModelError."""

    def __init__(
        self, client: EngineClient, server: ServerConfig, served: Callable[[str | None], str]
    ) -> None:
        self.generation = GenerationApi(client, server, served)
        self.responses = ResponsesApi(client, server, served)
        self.pooling = PoolingApi(client, client.spec, served)


ENDPOINTS: dict[str, Callable[[Apis], WholeAnswer]] = {
    "/v1/chat/completions": lambda apis: apis.generation.whole_chat,
    "/v1/completions": lambda apis: apis.generation.whole_completion,
    "/v1/responses": lambda apis: apis.responses.whole_response,
    "/v1/embeddings": lambda apis: apis.pooling.embeddings,
    "/pooling": lambda apis: apis.pooling.pooling,
    "/score": lambda apis: apis.pooling.score,
    "/v1/score": lambda apis: apis.pooling.score,
    "/rerank": lambda apis: apis.pooling.rerank,
    "/v1/rerank": lambda apis: apis.pooling.rerank,
    "/v2/rerank": lambda apis: apis.pooling.rerank,
}
