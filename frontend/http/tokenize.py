"""/tokenize and /detokenize, as vLLM has them. The tokenizer actor does the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from ...mq import codec
from ...mq.errors import InvalidRequestError
from ...mq.messages import Prompt
from ..client import EngineClient
from ..prompts import text_prompt, tokens_prompt
from .protocol import ChatRequest, sift
from .tools import check_tools

Served = Callable[[str | None], str]


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """prompt, or messages and the fields that go with them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] = []

    def read_prompt(self) -> Prompt:
        """Raises InvalidRequestError."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("either prompt or messages must be given", param="prompt")
        if self.prompt is not None:
            self._refuse_chat_fields()
            return text_prompt(self.prompt, self.add_special_tokens is not False)
        if self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens can't be true with messages: the chat template writes them",
                param="add_special_tokens",
            )
        assert self.messages is not None
        check_tools(self.tools)
        chat = ChatRequest(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
        )
        return chat.chat_prompt()

    def _refuse_chat_fields(self) -> None:
        for name in (
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
            "tools",
        ):
            if getattr(self, name):
                raise InvalidRequestError(f"{name} goes with messages, not prompt", param=name)


class TokenizeResponse(msgspec.Struct):
    """token_strs: the tokens as the vocabulary has them, where return_token_strs is true."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    """prompt: the text, special tokens included."""

    prompt: str


class TokenizeApi:
    """The handlers. served: the name of a model that a client may use, or an error."""

    def __init__(self, client: EngineClient, served: Served) -> None:
        self._client = client
        self._served = served

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)

    async def tokenize(self, request: web.Request) -> web.Response:
        """The tokens of a text, or of messages as the chat template renders them."""
        asked = sift(await request.read(), TokenizeRequest)
        self._served(asked.model)
        answer = await self._client.tokenize(asked.read_prompt(), asked.return_token_strs)
        ids: list[int] = codec.ints(answer.token_ids).tolist()
        texts = answer.texts if asked.return_token_strs else None
        return _json(TokenizeResponse(len(ids), self._client.spec.max_model_len, ids, texts))

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of tokens."""
        asked = sift(await request.read(), DetokenizeRequest)
        self._served(asked.model)
        ids = b""
        if asked.tokens:
            vocab_size = self._client.spec.vocab_size
            ids = tokens_prompt(asked.tokens, vocab_size, "tokens").token_ids
        return _json(DetokenizeResponse(await self._client.detokenize(ids)))


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
