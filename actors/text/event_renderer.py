"""Renders a stream's output as server-sent events of OpenAI's shape.

    data: {"id", "object": "chat.completion.chunk" or "text_completion", "created", "model",
           "choices": [{"index", "delta" or "text", "logprobs", "finish_reason"}],
           "usage" (of this choice so far; only with stream_options.continuous_usage_stats)}

Nearly every event is a few characters of text between bytes that never change within a stream, so
those are made once and only the text is encoded. The first event of a chat choice also names the
role; the last has finish_reason, and stop_reason beside it: the stop string or stop token id that
was found, null for the model's own end. A stream that is resumed has had its first event.

Of a chat whose output is parsed, events are made from deltas (parsers/parser.py): one for all text
that comes together, and one for each start of a tool call and each part of its arguments, for
clients that put calls together take one change to a call in an event. Reasoning goes by both names
that clients know it by. finish_reason is "tool_calls" where there has been a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...mq.messages import Finish, OpenStream
from .logprob_rows import LogprobRow
from .parsers.parser import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart

# vLLM's, and that of DeepSeek's API and of vLLM's earlier versions.
REASONING_NAMES = ("reasoning", "reasoning_content")
_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_encode = msgspec.json.Encoder().encode


class EventRenderer:
    """The events of one choice. `opened.output.form` is "chat" or "completion"."""

    __slots__ = (
        "_chat",
        "_close",
        "_first",
        "_head",
        "_num_chars",
        "_num_prompt_tokens",
        "_open",
        "_plain",
        "_tail",
        "_with_usage",
    )

    def __init__(self, opened: OpenStream) -> None:
        output = opened.output
        self._chat = output.form == "chat"
        fields = {
            "id": output.response_id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": output.created,
            "model": output.model,
        }
        index = opened.choice + output.index_offset
        self._head = b'data: %b,"choices":[{"index":%d,' % (_encode(fields)[:-1], index)
        self._open = self._head + (b'"delta":{"content":' if self._chat else b'"text":')
        self._close = b"}" if self._chat else b""
        self._tail = b'}],"usage":null}\n\n' if output.null_usage else b"}]}\n\n"
        self._plain = self._close + b',"logprobs":null,"finish_reason":null' + self._tail
        self._first = self._chat
        self._with_usage = output.continuous_usage
        self._num_prompt_tokens = opened.num_prompt_tokens
        self._num_chars = 0

    def resume(self, num_chars: int) -> None:
        """There have been events already, whose tokens have so many characters in all."""
        self._first = False
        self._num_chars = num_chars

    def event(
        self,
        text: str,
        rows: Sequence[LogprobRow],
        finish: Finish | None,
        num_tokens: int = 0,
    ) -> bytes:
        """One event with new text and the logprobs of the tokens since the last event.

        num_tokens: of the output so far.
        """
        if finish is None and not rows and not self._first and not self._with_usage:
            return self._open + _encode(text) + self._plain
        begin = self._open
        if self._first:
            begin = self._head + b'"delta":{"role":"assistant","content":'
            self._first = False
        tail = self._tail_at(num_tokens)
        parts = (begin, _encode(text), self._close, self._logprobs(rows), _end(finish), tail)
        return b"".join(parts)

    def events(
        self,
        deltas: list[Delta],
        rows: Sequence[LogprobRow],
        finish: Finish | None,
        called: bool,
        num_tokens: int = 0,
    ) -> bytes:
        """The events of new deltas; the first has the logprobs, the last the finish.

        called: there has been a tool call in this choice.
        """
        said = _fields(deltas)
        tail = self._tail_at(num_tokens)
        events = []
        for i, fields in enumerate(said):
            if self._first:
                content = None if fields else ""
                fields = {"role": "assistant", "content": content, **fields}
                self._first = False
            end = _end(finish, called) if i == len(said) - 1 else _end(None)
            parts = (self._head, b'"delta":', _encode(fields), self._logprobs(rows), end)
            events += [*parts, tail]
            rows = ()
        return b"".join(events)

    def _tail_at(self, num_tokens: int) -> bytes:
        if not self._with_usage:
            return self._tail
        prompt = self._num_prompt_tokens
        return b'}],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (
            prompt,
            num_tokens,
            prompt + num_tokens,
        )

    def _logprobs(self, rows: Sequence[LogprobRow]) -> bytes:
        if not rows:
            return b',"logprobs":null'
        if self._chat:
            return b',"logprobs":' + _encode(chat_logprobs(rows))
        value = completion_logprobs(rows, self._num_chars)
        self._num_chars = value["text_offset"][-1] + len(value["tokens"][-1])
        return b',"logprobs":' + _encode(value)


def chat_logprobs(rows: Sequence[LogprobRow]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    return {"content": [_chat_row(row) for row in rows]}


def completion_logprobs(rows: Sequence[LogprobRow], text_offset: int = 0) -> dict[str, Any]:
    """The `logprobs` object of a completion choice, whose first token is at `text_offset`."""
    out: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for row in rows:
        entries = _entries(row)
        token, logprob, _ = entries[0]
        out["tokens"].append(token)
        out["token_logprobs"].append(logprob)
        out["top_logprobs"].append({text: value for text, value, _ in reversed(entries)})
        out["text_offset"].append(text_offset)
        text_offset += len(token)
    return out


def _entries(row: LogprobRow) -> list[tuple[str, float, bytes]]:
    return [
        (text.decode(errors="replace"), max(logprob, _LEAST_LOGPROB), text)
        for text, logprob in zip(row.texts, row.logprobs, strict=True)
        if text is not None
    ]


def _chat_row(row: LogprobRow) -> dict[str, Any]:
    chosen, *likeliest = [
        {"token": token, "logprob": logprob, "bytes": list(data)}
        for token, logprob, data in _entries(row)
    ]
    return chosen | {"top_logprobs": likeliest}


def _end(finish: Finish | None, called: bool = False) -> bytes:
    if finish is None:
        return b',"finish_reason":null'
    return b',"finish_reason":%b,"stop_reason":%b' % (
        _encode(finish_reason(finish, called)),
        _encode(finish.stop_reason),
    )


def finish_reason(finish: Finish, called: bool) -> str:
    """As OpenAI says it. called: there has been a tool call."""
    return "tool_calls" if called else finish.reason


def _fields(deltas: list[Delta]) -> list[dict[str, Any]]:
    """The `delta` object of each event; one at least."""
    text: dict[str, Any] = {}
    events = [text]
    for delta in deltas:
        if isinstance(delta, Content):
            text["content"] = text.get("content", "") + delta.text
        elif isinstance(delta, Reasoning):
            for name in REASONING_NAMES:
                text[name] = text.get(name, "") + delta.text
        else:
            events.append({"tool_calls": [_call_fields(delta)]})
            text = {}
            events.append(text)
    return [event for event in events if event] or [{}]


def _call_fields(delta: ToolCallStart | ToolCallArguments) -> dict[str, Any]:
    if isinstance(delta, ToolCallStart):
        function = {"name": delta.name, "arguments": ""}
        return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
    return {"index": delta.index, "function": {"arguments": delta.text}}
