"""The answer of /v1/responses, and the events by which it grows.

    response.created, response.in_progress
    for each item (reasoning, message):
        response.output_item.added, response.content_part.added
        response.output_text.delta or response.reasoning_text.delta, as the text comes
        response.output_text.done or response.reasoning_text.done
        response.content_part.done, response.output_item.done
    response.completed, response.incomplete (max_output_tokens), or response.failed

Each has its `sequence_number`, from 0. An answer is built the same way if nobody listens. An item
begins where text of its kind comes; an output without any text is one empty message.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...actors.text.parsers.parser import Content, Delta, Reasoning
from ...mq.errors import RingcastError
from ...mq.messages import Finish

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
_STATUS: dict[str, Status] = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}


class OutputText(msgspec.Struct):
    text: str = ""
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct):
    text: str = ""
    type: Literal["reasoning_text"] = "reasoning_text"


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: Status = "in_progress"
    content: list[OutputText] = []
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: Status = "in_progress"
    content: list[ReasoningText] = []
    summary: list[Any] = []


class InputTokensDetails(msgspec.Struct):
    """cache_write_tokens: of a cache that has to be written to on purpose; there is none here."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct):
    message: str
    code: str = "server_error"


class TextFormat(msgspec.Struct):
    type: Literal["text"] = "text"


class TextConfig(msgspec.Struct):
    format: TextFormat = msgspec.field(default_factory=TextFormat)


class Response(msgspec.Struct, kw_only=True):
    """What clients get. Fields that can have one value only here say so to those that read them."""

    id: str
    created_at: int
    model: str
    temperature: float
    top_p: float
    object: Literal["response"] = "response"
    status: Status = "in_progress"
    output: list[OutputMessage | ReasoningItem] = []
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    user: str | None = None
    parallel_tool_calls: bool = True
    tools: list[Any] = []
    tool_choice: str = "auto"
    text: TextConfig = msgspec.field(default_factory=TextConfig)
    top_logprobs: int = 0
    truncation: Literal["disabled"] = "disabled"
    background: bool = False
    store: bool = False
    previous_response_id: str | None = None


class ResponseBuilder:
    """Puts `response` together; each method gives the events of what it changed."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self._num_events = 0
        self._pieces: list[str] = []
        self._num_tokens = 0
        self._num_reasoning_tokens = 0
        self._has_content = False

    def begin(self) -> list[bytes]:
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def add(self, deltas: list[Delta], num_tokens: int) -> list[bytes]:
        """What `num_tokens` new tokens said."""
        events: list[bytes] = []
        self._num_tokens += num_tokens
        for delta in deltas:
            assert isinstance(delta, Content | Reasoning), f"{delta!r} without tools"
            if delta.text:
                events += self._say(delta)
        if not self._has_content:
            self._num_reasoning_tokens = self._num_tokens
        return events

    def end(self, finish: Finish) -> list[bytes]:
        response = self.response
        status = _STATUS[finish.reason]
        events = [] if response.output else self._open(Content)
        events += self._close("completed" if status == "completed" else "incomplete")
        response.status = status
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails()
        reasoned = any(isinstance(item, ReasoningItem) for item in response.output)
        response.usage = ResponseUsage(
            finish.num_prompt_tokens,
            InputTokensDetails(finish.num_cached_tokens),
            finish.num_output_tokens,
            OutputTokensDetails(self._num_reasoning_tokens if reasoned else 0),
            finish.num_prompt_tokens + finish.num_output_tokens,
        )
        return [*events, self._whole(f"response.{'failed' if status == 'cancelled' else status}")]

    def fail(self, error: RingcastError) -> bytes:
        """The last event of a stream that breaks off."""
        self.response.status = "failed"
        self.response.error = ResponseError(str(error))
        return self._whole("response.failed")

    def _say(self, delta: Content | Reasoning) -> list[bytes]:
        kind = type(delta)
        is_content = kind is Content
        self._has_content |= is_content
        events: list[bytes] = []
        current = self.response.output[-1] if self.response.output else None
        if current is None or isinstance(current, OutputMessage) != is_content:
            events += self._close("completed") if current is not None else []
            events += self._open(kind)
        self._pieces.append(delta.text)
        name = "output_text" if is_content else "reasoning_text"
        return [*events, self._of_part(f"response.{name}.delta", delta=delta.text)]

    def _open(self, kind: type[Content] | type[Reasoning]) -> list[bytes]:
        output = self.response.output
        name = f"{self.response.id.removeprefix('resp_')}_{len(output)}"
        part: OutputText | ReasoningText
        if kind is Content:
            output.append(OutputMessage(f"msg_{name}"))
            part = OutputText()
        else:
            output.append(ReasoningItem(f"rs_{name}"))
            part = ReasoningText()
        return [
            self._of_item("response.output_item.added"),
            self._of_part("response.content_part.added", part=part),
        ]

    def _close(self, status: Status) -> list[bytes]:
        """The item that is open has its whole text."""
        text, self._pieces = "".join(self._pieces), []
        item = self.response.output[-1]
        item.status = status
        part: OutputText | ReasoningText
        if isinstance(item, OutputMessage):
            part = OutputText(text)
            item.content = [part]
            done = self._of_part("response.output_text.done", text=text)
        else:
            part = ReasoningText(text)
            item.content = [part]
            done = self._of_part("response.reasoning_text.done", text=text)
        return [
            done,
            self._of_part("response.content_part.done", part=part),
            self._of_item("response.output_item.done"),
        ]

    def _whole(self, name: str) -> bytes:
        return self._event(name, response=self.response)

    def _of_item(self, name: str) -> bytes:
        output = self.response.output
        return self._event(name, output_index=len(output) - 1, item=output[-1])

    def _of_part(self, name: str, **fields: Any) -> bytes:
        output = self.response.output
        if "output_text" in name:
            fields["logprobs"] = []
        place = {"item_id": output[-1].id, "output_index": len(output) - 1, "content_index": 0}
        return self._event(name, **place, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(body))
