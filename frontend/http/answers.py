"""The shapes of what the endpoints answer, to describe them to clients (/openapi.json).

Answers are written without these (responses.py, event_renderer.py); the tests hold that they agree.
Fields that are there only if they were asked for can be UNSET here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...mq.supervision import ActorStatus, EdgeStatus
from .responses import PromptTokensDetails, Usage


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of them."""


FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class PromptToken(Shape):
    """One of the tokens that were likely in a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]


class CompletionLogprobs(Shape):
    """By place. The first token of an echoed prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionCall(Shape):
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


class ChatToolCall(Shape):
    id: str
    function: FunctionCall
    type: Literal["function"]


class ChatMessage(Shape):
    """reasoning and reasoning_content are the same, where the server has a --reasoning-parser."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(Shape):
    """stop_reason: the stop string or stop token id that was found."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class StreamUsage(Shape):
    """Of one choice so far (continuous_usage_stats), or of all, in the last event."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class ToolCallFunctionDelta(Shape):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Shape):
    index: int
    function: ToolCallFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Shape):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatCompletionChunk(Shape):
    """An event of a stream, which ends with `data: [DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: StreamUsage | UnsetType | None = UNSET


class CompletionChoice(Shape):
    """stop_reason: the stop string or stop token id that was found."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET


class CompletionChunk(Shape):
    """An event of a stream, which ends with `data: [DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: StreamUsage | UnsetType | None = UNSET


class PromptUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embedding(Shape):
    """embedding: of encoding_format "base64", the float32 numbers as bytes, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PooledData(Shape):
    """data: as in Embedding."""

    object: Literal["pooling"]
    index: int
    data: list[float] | str


class Score(Shape):
    object: Literal["score"]
    index: int
    score: float


class PoolingAnswer(Shape):
    """What all lists of a pooling model have; id and created are vLLM's."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PromptUsage


class EmbeddingList(PoolingAnswer):
    data: list[Embedding]


class PooledList(PoolingAnswer):
    data: list[PooledData]


class ScoreList(PoolingAnswer):
    data: list[Score]


class RankedDocument(Shape):
    text: str


class RankedResult(Shape):
    """document: where return_documents is true."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(Shape):
    """The likest first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[RankedResult]


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a stream of /v1/responses; what else is in it depends on its type."""

    type: str
    sequence_number: int


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class Version(Shape):
    version: str


def _named(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A message as JSON has it, with the names of its fields."""
    fields = [(field.name, field.type) for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(
        kind.__name__, fields, kw_only=True, forbid_unknown_fields=True, namespace={"__doc__": ""}
    )


StatusAnswer: Any = msgspec.defstruct(
    "StatusAnswer",
    [
        ("actors", list[_named(ActorStatus)]),  # type: ignore[misc]
        ("edges", list[_named(EdgeStatus)]),  # type: ignore[misc]
        ("statistics", dict[str, float]),
    ],
    forbid_unknown_fields=True,
)
