"""A chat template: jinja source that turns messages into the text a model was trained on.

Templates come with models and with requests, so they run in jinja's sandbox and can change nothing
they are given. The environment is the one that Hugging Face's templates are written for: block
lines are trimmed, loops have break and continue, and there are `tojson`, `raise_exception`,
`strftime_now` and a `generation` block (which only training needs).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...mq.errors import InvalidRequestError
from .chat_messages import ChatMessage, join_parts, split_parts

NUM_CACHED_TEMPLATES = 64
# Ends a message that is to be continued; the blank tells whether the template trims contents.
_MARK = "\x02continue-here\x03"
_MARK_BLANK = _MARK + " "


class ChatTemplate:
    """A compiled template. Raises jinja2.TemplateError if the source is none.

    takes_parts: the template loops over a message's content and never asks whether it is a string,
    so it is given lists of parts; all others are given strings.
    """

    def __init__(self, source: str, clock: Callable[[], datetime] = datetime.now) -> None:
        environment = _environment(clock)
        tree = environment.parse(source)
        self.takes_parts = _takes_parts(tree)
        self._template = environment.from_string(tree)

    def render(
        self,
        messages: list[ChatMessage],
        variables: dict[str, Any],
        continue_final_message: bool = False,
    ) -> str:
        """The prompt's text. Raises InvalidRequestError with the template's words if it refuses."""
        messages = join_parts(messages)
        if continue_final_message:
            messages = _marked(messages)
        if self.takes_parts:
            messages = split_parts(messages)
        try:
            text = self._template.render(messages=messages, **variables)
        except Exception as error:  # a template is a program: it may fail with anything
            reason = f"the chat template failed: {_words(error)}"
            raise InvalidRequestError(reason, "messages") from error
        return _cut_at_mark(text) if continue_final_message else text


class ChatTemplates:
    """Compiles each source once and keeps those last used."""

    def __init__(self, clock: Callable[[], datetime] = datetime.now) -> None:
        self._compiled = lru_cache(NUM_CACHED_TEMPLATES)(lambda source: ChatTemplate(source, clock))

    def get(self, source: str) -> ChatTemplate:
        """Raises InvalidRequestError with line and reason if `source` is no template."""
        try:
            return self._compiled(source)
        except (TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            reason = f"the chat template has an error{where}: {_words(error)}"
            raise InvalidRequestError(reason, "chat_template") from error


class _GenerationBlock(Extension):
    """{% generation %}...{% endgeneration %} marks what the assistant said: rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment(clock: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"


def _takes_parts(tree: nodes.Template) -> bool:
    loops = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
    return loops and not any(test.name == "string" for test in tree.find_all(nodes.Test))


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Getattr) and node.attr == "content"


def _marked(messages: list[ChatMessage]) -> list[ChatMessage]:
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise InvalidRequestError(
            "continue_final_message needs a last message that has a content",
            "continue_final_message",
        )
    return [*messages[:-1], messages[-1] | {"content": content + _MARK_BLANK}]


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_MARK)
    if place < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template leaves out or changes the last content",
            "continue_final_message",
        )
    kept = text[:place]
    return kept if text.startswith(_MARK_BLANK, place) else kept.rstrip()
