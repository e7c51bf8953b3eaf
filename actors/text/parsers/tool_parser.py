"""What parsers of tool calls have in common: calls as JSON objects, their numbers and their ids."""

from __future__ import annotations

from abc import abstractmethod
from hashlib import blake2b
from typing import Any, ClassVar, NoReturn

import msgspec

from .parser import Grammar, Parser, ToolCallArguments, ToolCallStart

Types = dict[str, dict[str, list[str]]]


class ToolParser(Parser):
    """key: tells this choice from every other there has been; the ids of its calls are made of it.

    So a choice that is taken over by another engine has the same ids.

    types: as in ParserSpec. typed: whether the parser asks for them.
    """

    typed: ClassVar[bool] = False

    def __init__(self, key: str, types: Types | None = None) -> None:
        self._key = key
        self._types = types or {}
        super().__init__()

    def call_id(self, index: int) -> str:
        return "chatcmpl-tool-" + self.digest(index).hex()

    def digest(self, index: int) -> bytes:
        return blake2b(f"{self._key}/{index}".encode(), digest_size=16).digest()

    def _call(self, name: str, arguments: str) -> None:
        """What is held was a call."""
        self._held.clear()
        index = self._num_calls
        self._num_calls += 1
        self._deltas += (
            ToolCallStart(index, self.call_id(index), name),
            ToolCallArguments(index, arguments),
        )

    def _read(self, text: str | None, keys: tuple[str, ...] = ("arguments",)) -> bool:
        """Take a JSON object for a call, {"name": "f", "arguments": {...}}; False if it is none.

        keys: what the arguments may be called. There must be one of them.
        """
        call = None if text is None else _read_call(text, keys)
        if call is not None:
            self._call(*call)
        return call is not None


class MarkedCallParser(ToolParser):
    """Calls that stand behind one of `begins`, anywhere in the text."""

    def _parse(self) -> Grammar[NoReturn]:
        again, called = "", False
        while True:
            mark = yield from self._find(again, first=called)
            called = yield from self._call_behind(mark)
            again = "" if called else self._undo()

    @abstractmethod
    def _call_behind(self, mark: str) -> Grammar[bool]:
        """Whether what comes is a call; it has been returned (`_call`) then."""


def is_object(text: str) -> bool:
    """Whether this is valid JSON, and an object."""
    return isinstance(read_json(text), dict)


def _read_call(text: str, keys: tuple[str, ...]) -> tuple[str, str] | None:
    whole = read_json(text)
    if not isinstance(whole, dict):
        return None
    name = whole.get("name")
    given = [key for key in keys if key in whole]
    if not isinstance(name, str) or not name or len(given) != 1:
        return None
    if not isinstance(whole[given[0]], dict):
        return None
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return name, bytes(raw[given[0]]).decode()


def read_json(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
