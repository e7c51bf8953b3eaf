"""Tool calls of Mistral's models, in the two ways that they have been written:

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}

[ARGS] may be missing, and [CALL_ID] with an id of the model's may come before it. Their chat
templates take only ids of nine letters and digits, so that is what calls get.
"""

from __future__ import annotations

import re
import string
from typing import NoReturn

from .parser import Grammar
from .tool_parser import ToolParser, is_object

_ID_LETTERS = string.digits + string.ascii_letters
_ID_LENGTH = 9
_HEAD = re.compile(r"([\w.-]{1,128})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s*", re.ASCII)
_HEAD_LETTERS = frozenset(string.ascii_letters + string.digits + "_.-[]" + string.whitespace)
_MOST_HEAD_LETTERS = 256


class MistralParser(ToolParser):
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    begins = ("[TOOL_CALLS]",)

    def call_id(self, index: int) -> str:
        number = int.from_bytes(self.digest(index))
        letters = []
        for _ in range(_ID_LENGTH):
            number, place = divmod(number, len(_ID_LETTERS))
            letters.append(_ID_LETTERS[place])
        return "".join(letters)

    def _parse(self) -> Grammar[NoReturn]:
        again, called = "", False
        while True:
            yield from self._find(again, first=called)
            letter = yield from self._skip_blanks()
            called = yield from self._list() if letter == "[" else self._named(letter)
            again = "" if called else self._undo()

    def _list(self) -> Grammar[bool]:
        """The calls of a list, up to the first that is none; whether it came to its end."""
        while self._read((yield from self._object())):
            letter = yield from self._skip_blanks()
            if letter == "]":
                self._held.clear()
                return True
            if letter != ",":
                break
        return False

    def _named(self, letter: str) -> Grammar[bool]:
        """A name and its arguments; whether they are a call."""
        head = ""
        while letter != "{":
            head += letter
            if letter not in _HEAD_LETTERS or len(head) > _MOST_HEAD_LETTERS:
                return False
            letter = yield None
        name = _HEAD.fullmatch(head)
        if name is None:
            return False
        arguments = yield from self._object(letter)
        if arguments is None or not is_object(arguments):
            return False
        self._call(name[1], arguments)
        return True
