"""One choice's output through its parsers: first what is reasoning, then what are tool calls.

Special tokens that the parsers look for (`markers_of`) stay in the text they are given, all others
are left out as skip_special_tokens says. Where the prompt has opened the reasoning, the text begins
with the mark that did (`opener_of`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from ....mq.messages import ParserSpec
from . import REASONING_PARSERS, TOOL_PARSERS, find_parser
from .parser import Content, Delta, Parser, Reasoning, ToolCallArguments, ToolCallStart


class OutputParser:
    """See parser.py for `feed` and `end`. called: there has been a tool call.

    request_id, choice: the engine's, which stay the same at a takeover.
    """

    def __init__(self, spec: ParserSpec, request_id: str, choice: int) -> None:
        self.called = False
        self._parallel = spec.parallel
        self._reasoning: Parser | None = None
        self._tools: Parser | None = None
        if spec.reasoning:
            self._reasoning = find_parser(REASONING_PARSERS, spec.reasoning)()
        if spec.tools:
            kind = find_parser(TOOL_PARSERS, spec.tools)
            self._tools = kind(f"{request_id}/{choice}", spec.types)

    def feed(self, text: str) -> list[Delta]:
        if self._reasoning is None:
            return self._find_calls([Content(text)])
        return self._find_calls(self._reasoning.feed(text))

    def end(self) -> list[Delta]:
        deltas = self._find_calls(self._reasoning.end()) if self._reasoning is not None else []
        return deltas + self._given(self._tools.end() if self._tools is not None else [])

    def _find_calls(self, deltas: list[Delta]) -> list[Delta]:
        if self._tools is None:
            return deltas
        found: list[Delta] = []
        for delta in deltas:
            found += self._tools.feed(delta.text) if isinstance(delta, Content) else [delta]
        return self._given(found)

    def _given(self, deltas: list[Delta]) -> list[Delta]:
        """Without the calls that nobody wants."""
        self.called = self.called or any(isinstance(delta, ToolCallStart) for delta in deltas)
        if self._parallel:
            return deltas
        return [delta for delta in deltas if not getattr(delta, "index", 0)]


class ToolCall(msgspec.Struct):
    id: str
    name: str
    arguments: str


class ParsedOutput(msgspec.Struct):
    """A whole output."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []


def parse_output(text: str, spec: ParserSpec, request_id: str, choice: int) -> ParsedOutput:
    """A whole output's text: the deltas of a stream, put together."""
    parser = OutputParser(spec, request_id, choice)
    return put_together(parser.feed(text) + parser.end())


def put_together(deltas: list[Delta]) -> ParsedOutput:
    calls: dict[int, ToolCall] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            calls[delta.index] = ToolCall(delta.id, delta.name, "")
            arguments[delta.index] = []
        elif isinstance(delta, ToolCallArguments):
            arguments[delta.index].append(delta.text)
    for index, call in calls.items():
        call.arguments = "".join(arguments[index])
    return ParsedOutput(
        content="".join(delta.text for delta in deltas if isinstance(delta, Content)),
        reasoning="".join(delta.text for delta in deltas if isinstance(delta, Reasoning)),
        tool_calls=list(calls.values()),
    )


def markers_of(spec: ParserSpec) -> frozenset[str]:
    """What may be special tokens and must be in the text."""
    return frozenset(marker for parser in _classes(spec) for marker in parser.markers)


def takes_types(tools: str) -> bool:
    """Whether the parser of calls by this name asks for the types of parameters."""
    return bool(tools) and bool(find_parser(TOOL_PARSERS, tools).typed)


def opener_of(spec: ParserSpec) -> str:
    """The mark at the end of a prompt that opens the reasoning; nothing where none does."""
    if not spec.reasoning:
        return ""
    opener: str = find_parser(REASONING_PARSERS, spec.reasoning).opener
    return opener


def _classes(spec: ParserSpec) -> list[Any]:
    classes = []
    if spec.reasoning:
        classes.append(find_parser(REASONING_PARSERS, spec.reasoning))
    if spec.tools:
        classes.append(find_parser(TOOL_PARSERS, spec.tools))
    return classes
