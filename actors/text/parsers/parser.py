"""What a parser is: text goes in piece by piece, and what it means comes out as deltas.

The contract:

1. `feed` takes the next piece of the text and returns what is certain by now; `end` returns what is
   left when no more comes, and is called once. Neither ever raises, whatever the text.
2. What has been returned after some text does not depend on how the text was cut into pieces.
3. What is no complete, well-formed call is content, letter by letter. A call is returned once it is
   complete, with its arguments as JSON: as the model wrote them, where it writes JSON. Only
   whitespace between calls and after them, and the marks around them, are dropped.
4. The time is linear in the text: what has turned out to be no call is not read again.

A parser's rules are a grammar: a coroutine (`_parse`) that is sent the text a character at a time,
and at the end of each candidate decides what becomes of all that it was sent since the last one.
Where the grammar would take any number of certain characters alike, it yields a pattern of such a
*run*, and may be sent several of them at once. So rule 2 holds by construction.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import ClassVar, NoReturn, TypeVar

import msgspec

from .json_object import JsonObject

T = TypeVar("T")
Run = re.Pattern[str] | None
Grammar = Generator[Run, str, T]
ANYTHING = re.compile(r"(?s:.+)")
MAX_NAME_LENGTH = 256


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """index: of the call among the choice's calls, from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """The next part of a call's arguments: JSON text."""

    index: int
    text: str


Delta = Content | Reasoning | ToolCallStart | ToolCallArguments


class Parser(ABC):
    """The driver of a grammar, and the rules that all grammars need.

    markers: texts that may be special tokens of the model, and must be in the parser's text.
    begins: what begins a candidate anywhere. None of these ends within another.
    begins_first: what begins one where there was only whitespace before, since the beginning or
        since a call. fillers: what is dropped there after a call.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    begins: ClassVar[tuple[str, ...]] = ()
    begins_first: ClassVar[tuple[str, ...]] = ()
    fillers: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        letters = "".join({re.escape(mark[0]) for mark in self.begins})
        self._plain = re.compile(f"[^{letters}]+") if letters else ANYTHING
        self._kind: type[Content | Reasoning] = Content
        self._deltas: list[Delta] = []
        self._held: list[str] = []  # sent to the grammar, and not decided upon
        self._num_calls = 0
        self._plain_text = False  # nothing is held, and all that a run would do is to be released
        self._grammar = self._parse()
        self._run = next(self._grammar)

    def feed(self, text: str) -> list[Delta]:
        place, end = 0, len(text)
        while place < end:
            run = self._run.match(text, place) if self._run is not None else None
            stop = place + 1 if run is None else run.end()
            piece = text[place:stop]
            place = stop
            self._held.append(piece)
            if run is not None and self._plain_text:
                self._release()
            else:
                self._run = self._grammar.send(piece)
        return self._take()

    def end(self) -> list[Delta]:
        if not (self._num_calls and "".join(self._held).isspace()):
            self._release()
        return self._take()

    @abstractmethod
    def _parse(self) -> Grammar[NoReturn]:
        """The grammar. It never ends."""

    def _find(self, again: str = "", first: bool = False) -> Grammar[str]:
        """Up to one of the marks that begin a call, which is returned and held.

        What comes before it is released; whitespace is held with it where `first` still holds.

        again: what is held already, to be looked at first: a marker, or the beginning of one.
        first: there was only whitespace so far, so `begins_first` and `fillers` count.
        """
        seen = again  # the last of the text, where a marker may have begun
        fillers = self.fillers if self._num_calls else ()
        while True:
            marks = self.begins + self.begins_first + fillers if first else self.begins
            found, length = _overlap(seen, marks)
            if first and found in fillers:
                self._held.clear()
                seen = ""
            elif found:
                if not first:
                    self._release(length)
                self._plain_text = False
                return found
            else:
                before = seen[: len(seen) - length]
                first = first and (not before or before.isspace())
                if not first:
                    self._release(length)
                seen = seen[len(seen) - length :]
            self._plain_text = not seen and not first
            seen += yield self._plain if self._plain_text else None

    def _skip_blanks(self) -> Grammar[str]:
        """The next character that is no whitespace."""
        while True:
            letter = yield None
            if not letter.isspace():
                return letter

    def _object(self, first: str = "") -> Grammar[str | None]:
        """The text of a JSON object; None as soon as it can't be one (see `_undo`).

        first: its first character, if that has been sent.
        """
        json, parts = JsonObject(), []
        piece = first or (yield from self._skip_blanks())
        while json.take(piece):
            parts.append(piece)
            if json.done:
                return "".join(parts)
            piece = yield json.run
        return None

    def _tag(self, *tags: str) -> Grammar[str]:
        """Which of these comes next but for whitespace; nothing as soon as none can."""
        seen = yield from self._skip_blanks()
        while seen not in tags:
            if not any(tag.startswith(seen) for tag in tags):
                return ""
            seen += yield None
        return seen

    def _name(self, end: str) -> Grammar[str]:
        """What comes before the character `end`; nothing as soon as it can't be a name."""
        name = ""
        while (letter := (yield None)) != end:
            name += letter
            if letter in "<\n" or len(name) > MAX_NAME_LENGTH:
                return ""
        return name.strip()

    def _until(self, mark: str) -> Grammar[str]:
        """What comes before a mark, which is held as well. (It begins as it doesn't go on.)"""
        run = re.compile(f"[^{re.escape(mark[0])}]+")
        parts, seen = [], ""  # seen: the last of it, where the mark may have begun
        while seen != mark:
            piece = yield None if seen else run
            parts.append(piece)
            seen += piece
            _, length = _overlap(seen, (mark,))
            seen = seen[len(seen) - length :]
        return "".join(parts)[: -len(mark)]

    def _undo(self) -> str:
        """The candidate that is held is none: release it but for its end, if a marker may begin
        there. That is returned, for `_find` to look at again.
        """
        held = "".join(self._held)
        _, length = _overlap(held, self.begins)
        self._release(length)
        return held[len(held) - length :]

    def _release(self, num_kept: int = 0) -> None:
        """What is held is text, but for the last characters of it."""
        held = "".join(self._held)
        text = held[: len(held) - num_kept]
        self._held = [held[len(text) :]] if num_kept else []
        if not text:
            return
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, Content | Reasoning) and type(last) is self._kind:
            self._deltas[-1] = self._kind(last.text + text)
        else:
            self._deltas.append(self._kind(text))

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


def _overlap(text: str, marks: tuple[str, ...]) -> tuple[str, int]:
    """The mark that `text` ends in, if any, and how much of its end is a mark or may become one."""
    longest = max(map(len, marks), default=0)
    for length in range(min(len(text), longest), 0, -1):
        end = text[len(text) - length :]
        for mark in marks:
            if mark.startswith(end):
                return (mark if mark == end else ""), length
    return "", 0
