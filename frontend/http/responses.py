"""The JSON of complete answers: chat.completion, text_completion, log-probabilities, usage."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...actors.text.event_renderer import (
    REASONING_NAMES,
    chat_logprobs,
    completion_logprobs,
    finish_reason,
)
from ...actors.text.logprob_rows import LogprobRow
from ...actors.text.parsers.output_parser import ToolCall, parse_output
from ...mq import codec
from ...mq.messages import Chunk
from ..handle import RequestHandle
from ..outputs import Logprob, logprob_rows, prompt_logprob_rows, prompt_logprobs
from .echo import Echo, echoed_logprobs

Form = Literal["chat", "completion"]
OBJECTS = {"chat": "chat.completion", "completion": "text_completion"}
CHUNK_OBJECTS = {"chat": "chat.completion.chunk", "completion": "text_completion"}


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class EventUsage(msgspec.Struct):
    """Of one choice so far, in an event of a stream (continuous_usage_stats)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(handles: list[RequestHandle]) -> Usage:
    """Of finished requests, summed. A prompt counts once, however many choices it had."""
    prompt = cached = output = 0
    for handle in handles:
        finishes = [finish for finish in handle.finishes if finish is not None]
        prompt += finishes[0].num_prompt_tokens
        cached += max(finish.num_cached_tokens for finish in finishes)
        output += sum(finish.num_output_tokens for finish in finishes)
    return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))


class Answer:
    """One choice of a complete answer, from its chunks."""

    def __init__(self, handle: RequestHandle, choice: int) -> None:
        output = handle.request.output
        self.index = output.index_offset + choice
        self._key = (handle.request_id, choice)
        self._parsers = output.parsers
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)

    def choice(self, form: Form, echo: Echo | None = None) -> dict[str, Any]:
        """echo: what the text of a completion begins with."""
        text = "".join(chunk.text for chunk in self._chunks)
        if echo is not None:
            text = echo.text if echo.alone else echo.text + text
        finish = self._chunks[-1].finish
        assert finish is not None
        alone = echo is not None and echo.alone
        said: dict[str, Any] = {"text": text}
        called = False
        if form == "chat":
            message = self._message(text)
            said, called = {"message": message}, "tool_calls" in message
        return {
            "index": self.index,
            **said,
            "logprobs": self._logprobs(form, echo),
            "finish_reason": "length" if alone else finish_reason(finish, called),
            "stop_reason": None if alone else finish.stop_reason,
        }

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._parsers is None:
            return message
        output = parse_output(text, self._parsers, *self._key)
        message["content"] = output.content
        if self._parsers.reasoning:
            message |= dict.fromkeys(REASONING_NAMES, output.reasoning or None)
        if output.tool_calls:
            message["tool_calls"] = [_tool_call(call) for call in output.tool_calls]
        if output.tool_calls or output.reasoning:
            message["content"] = output.content or None
        return message

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None]:
        """Of the request's prompt; the first choice alone has them."""
        return [None, *(each for chunk in self._chunks for each in prompt_logprobs(chunk))]

    def prompt_rows(self) -> list[LogprobRow]:
        """Likewise, as rows."""
        return [row for chunk in self._chunks for row in prompt_logprob_rows(chunk)]

    def token_ids(self) -> list[int]:
        packed = b"".join([chunk.token_ids for chunk in self._chunks])
        ids: list[int] = codec.ints(packed).tolist()
        return ids

    def _logprobs(self, form: Form, echo: Echo | None) -> dict[str, Any] | None:
        rows = [row for chunk in self._chunks for row in logprob_rows(chunk)]
        if not rows:
            return None
        if echo is not None:
            return echoed_logprobs(echo, rows)
        return chat_logprobs(rows) if form == "chat" else completion_logprobs(rows)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def add_token_ids(
    body: dict[str, Any],
    handles: list[RequestHandle],
    groups: list[list[Answer]],
    form: Form,
    prompt_only: bool,
) -> None:
    """As vLLM has them (return_token_ids)."""
    choices = iter(body["choices"])
    for handle, group in zip(handles, groups, strict=True):
        of_prompt = codec.ints(handle.prompt_token_ids).tolist()
        if form == "chat":
            body["prompt_token_ids"] = of_prompt
        for answer in group:
            choice = next(choices)
            choice["token_ids"] = [] if prompt_only else answer.token_ids()
            if form == "completion":
                choice["prompt_token_ids"] = of_prompt


def add_prompt_logprobs(body: dict[str, Any], groups: list[list[Answer]], form: Form) -> None:
    """As vLLM has them: of completions in each choice, of a chat beside its choices."""
    of_prompts = [group[0].prompt_logprobs() for group in groups]
    if form == "chat":
        body["prompt_logprobs"] = of_prompts[0]
        return
    choices = iter(body["choices"])
    for group, of_prompt in zip(groups, of_prompts, strict=True):
        for _ in group:
            next(choices)["prompt_logprobs"] = of_prompt
