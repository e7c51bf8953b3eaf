"""The handlers of pooling models: embeddings, and the scores that are made of them."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from ...mq.config import ModelSpec, PoolingSpec
from ...mq.errors import InvalidRequestError, OverloadedError
from ...mq.messages import Prompt
from ..client import EngineClient
from ..embedding import Embedded, cosine, embed, pair_up
from .pooling_protocol import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    read_pooling_request,
)
from .whole_answer import over_http


class PoolingApi:
    """served: the name that a request's model is served by; raises UnknownModelError."""

    def __init__(
        self, client: EngineClient, spec: ModelSpec, served: Callable[[str | None], str]
    ) -> None:
        self._client = client
        self._spec = spec
        self._served = served

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/embeddings", over_http(self.embeddings))
        router.add_post("/pooling", over_http(self.pooling))
        for path in ("/score", "/v1/score"):
            router.add_post(path, over_http(self.score))
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            router.add_post(path, over_http(self.rerank))

    async def embeddings(self, body: bytes, name: str) -> web.Response:
        """Vectors of texts (an embedding model's)."""
        return await self._vectors(body, f"embd-{name}", "embedding", "embedding")

    async def pooling(self, body: bytes, name: str) -> web.Response:
        """The same vectors, as vLLM gives them."""
        return await self._vectors(body, f"pool-{name}", "pooling", "data")

    async def score(self, body: bytes, name: str) -> web.Response:
        """How alike texts are: the cosine of their vectors."""
        self._client.check_kind(pooled=True)
        asked = read_pooling_request(body, ScoreRequest)
        model = self._served(asked.model)
        first, second = asked.prompts()
        pairs = pair_up(len(first), len(second), ("text_1", "text_2"))
        done = await self._embed([*first, *second], asked, "text_2")
        scores = _scores(done, [(a, len(first) + b) for a, b in pairs])
        data = [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)]
        return _listed(f"score-{name}", model, data, done)

    async def rerank(self, body: bytes, name: str) -> web.Response:
        """The documents by their likeness to the query, the likest first."""
        self._client.check_kind(pooled=True)
        asked = read_pooling_request(body, RerankRequest)
        model = self._served(asked.model)
        done = await self._embed(asked.prompts(), asked, "documents")
        scores = _scores(done, [(0, i) for i in range(1, len(done))])
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        results: list[dict[str, Any]] = []
        for i in order[: asked.top_n or len(order)]:
            result: dict[str, Any] = {"index": i, "relevance_score": scores[i]}
            if asked.return_documents:
                result["document"] = {"text": asked.documents[i]}
            results.append(result)
        usage = _usage(done)
        return _json({"id": f"rerank-{name}", "model": model, "usage": usage, "results": results})

    async def _vectors(self, body: bytes, name: str, kind: str, field: str) -> web.Response:
        pooling = self._pooling()
        asked = read_pooling_request(body, EmbeddingRequest)
        model = self._served(asked.model)
        prompts = asked.prompts(self._spec.vocab_size, pooling)
        done = await self._embed(prompts, asked, "input")
        as_text = asked.encoding_format == "base64"
        data = [
            {"object": kind, "index": i, field: _encoded(one.vector, as_text)}
            for i, one in enumerate(done)
        ]
        return _listed(name, model, data, done)

    def _pooling(self) -> PoolingSpec:
        self._client.check_kind(pooled=True)
        assert self._spec.pooling is not None
        return self._spec.pooling

    async def _embed(
        self, prompts: list[Prompt], asked: PoolingRequest, param: str
    ) -> list[Embedded]:
        count, client = len(prompts), self._client
        keep = asked.keep_prompt_tokens(self._spec)
        if count > client.max_num_queued_reqs:
            raise InvalidRequestError(
                f"{param} makes {count} prompts; this server holds "
                f"{client.max_num_queued_reqs} requests at most",
                param=param,
            )
        if count > client.room:
            raise OverloadedError(f"there is room for {client.room} more requests, not {count}")
        try:
            return await embed(client, prompts, [asked.priority] * count, keep_prompt_tokens=keep)
        except InvalidRequestError as error:
            if error.param == "prompt":  # the tokenizer's word for what has several names here
                error.param = param if param == "input" else None
            raise


def _scores(done: Sequence[Embedded], pairs: Sequence[tuple[int, int]]) -> list[float]:
    return [cosine(done[a].vector, done[b].vector) for a, b in pairs]


def _encoded(vector: NDArray[np.float32], as_text: bool) -> str | list[float]:
    """base64 is of float32, little-endian."""
    if as_text:
        return base64.b64encode(vector.tobytes()).decode()
    values: list[float] = vector.tolist()
    return values


def _listed(
    name: str, model: str, data: list[dict[str, Any]], done: Sequence[Embedded]
) -> web.Response:
    return _json(
        {
            "id": name,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": _usage(done),
        }
    )


def _usage(done: Sequence[Embedded]) -> dict[str, int]:
    count = sum(one.num_tokens for one in done)
    return {"prompt_tokens": count, "total_tokens": count}


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
