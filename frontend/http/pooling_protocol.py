"""What clients may send to /v1/embeddings, /pooling, /score and /rerank.

A body is read as in protocol.py: null is as good as absent, what says nothing about the output is
dropped, and what would change it and can't be had is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from ...mq.config import ModelSpec, PoolingSpec
from ...mq.errors import InvalidRequestError
from ...mq.messages import Prompt
from ..prompts import text_prompt, tokens_prompt
from .protocol import invalid_field, kept_prompt_tokens, read_fields

_REASONS = {
    "messages": "chats are not embedded here; input takes text and token ids",
}


class PoolingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all of them have. truncate_prompt_tokens: of each longer prompt only its last tokens
    count, so many, or as many as the model takes (-1).
    """

    model: str | None = None
    priority: int = 0
    truncate_prompt_tokens: int | None = None

    def keep_prompt_tokens(self, spec: ModelSpec) -> int:
        """As in Generate. Raises InvalidRequestError."""
        return kept_prompt_tokens(self.truncate_prompt_tokens, spec, output=0)


class EmbeddingRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    add_special_tokens: bool = True

    def prompts(self, vocab_size: int, pooling: PoolingSpec) -> list[Prompt]:
        """One or several prompts, of text or token ids. Raises InvalidRequestError."""
        if self.dimensions not in (None, pooling.dimension):
            raise InvalidRequestError(
                f"dimensions = {self.dimensions}: this model's embeddings have "
                f"{pooling.dimension} dimensions, and can't be shortened",
                param="dimensions",
            )
        given = self.input
        if isinstance(given, str):
            return [self._text(given, "input")]
        if not given:
            raise InvalidRequestError("input must not be an empty list", param="input")
        kinds = {type(item) for item in given}
        if kinds == {int}:
            return [tokens_prompt(given, vocab_size, "input")]
        if kinds == {str}:
            return [self._text(text, f"input[{i}]") for i, text in enumerate(given)]
        if kinds == {list}:
            return [tokens_prompt(ids, vocab_size, f"input[{i}]") for i, ids in enumerate(given)]
        raise InvalidRequestError(
            "input must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids",
            param="input",
        )

    def _text(self, text: str, param: str) -> Prompt:
        return _text(text, param, self.add_special_tokens)


class ScoreRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    text_1: str | list[str]
    text_2: str | list[str]

    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        return _texts(self.text_1, "text_1"), _texts(self.text_2, "text_2")


class RerankRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """top_n: how many of the documents are given back; 0 for all."""

    query: str
    documents: list[str]
    top_n: int = 0
    return_documents: bool = True

    def prompts(self) -> list[Prompt]:
        """The query, then the documents."""
        if self.top_n < 0:
            raise InvalidRequestError(
                f"top_n must be an integer of at least 0, got {self.top_n}", param="top_n"
            )
        return [_text(self.query, "query"), *_texts(self.documents, "documents")]


R = TypeVar("R", EmbeddingRequest, ScoreRequest, RerankRequest)


def read_pooling_request(body: bytes, kind: type[R]) -> R:
    """A body as a request. Raises InvalidRequestError that names the field at fault."""
    fields = read_fields(body)
    for name, reason in _REASONS.items():
        if name in fields:
            raise InvalidRequestError(f"{name} is not supported: {reason}", param=name)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def _texts(given: str | Sequence[str], param: str) -> list[Prompt]:
    if isinstance(given, str):
        return [_text(given, param)]
    if not given:
        raise InvalidRequestError(f"{param} must not be an empty list", param=param)
    return [_text(text, f"{param}[{i}]") for i, text in enumerate(given)]


def _text(text: str, param: str, add_special_tokens: bool = True) -> Prompt:
    if not text:
        raise InvalidRequestError(f"{param} is empty", param=param)
    return text_prompt(text, add_special_tokens)
