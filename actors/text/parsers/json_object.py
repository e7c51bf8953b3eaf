"""Finds the end of a JSON object in a text that arrives piece by piece.

    expects      takes                          then expects
    begin        {                              key or }
    key          "...", or } in an empty object colon, or (after }) comma
    colon        :                              value
    value        { [ "..." number word          as it says
    comma        , } ] as the innermost says    key or value, or comma again

Whitespace is taken between all of these. Anything else, and nesting beyond MAX_DEPTH, is a failure
at once. What numbers, words and escapes say in detail is left to the JSON decoder that reads the
whole.
"""

from __future__ import annotations

import re

MAX_DEPTH = 100
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_BLANKS = " \t\r\n"
_SCALAR_LETTERS = frozenset("0123456789+-.eEtrufalsn")
_CLOSERS = {"{": "}", "[": "]"}


class JsonObject:
    """done: the object is complete. run: what may be taken in one piece now."""

    __slots__ = ("_expects", "_mode", "_open", "_was_key", "done", "run")

    def __init__(self) -> None:
        self.done = False
        self.run: re.Pattern[str] | None = None
        self._expects = "begin"
        self._mode = ""  # "string", "escape" or "scalar" within one
        self._open: list[str] = []
        self._was_key = False

    def take(self, piece: str) -> bool:
        """Take the next character, or a run of them; False if that can't be."""
        if self._mode == "string":
            return self._string(piece)
        if self._mode == "escape":
            self._mode, self.run = "string", _IN_STRING
            return piece in '"\\/bfnrtu'
        if self._mode == "scalar":
            if piece in _SCALAR_LETTERS:
                return True
            self._mode = ""
        if piece in _BLANKS:
            return self._expects != "begin"
        return self._token(piece)

    def _string(self, piece: str) -> bool:
        if piece == '"':
            self._mode, self.run = "", None
            self._expects = "colon" if self._was_key else "comma"
        elif piece == "\\":
            self._mode, self.run = "escape", None
        return piece[0] >= " "

    def _token(self, letter: str) -> bool:
        expects = self._expects
        if expects == "begin":
            return letter == "{" and self._enter(letter)
        if expects == "colon":
            self._expects = "value"
            return letter == ":"
        if expects == "comma":
            if letter == ",":
                self._expects = "key" if self._open[-1] == "{" else "value"
                return True
            return self._leave(letter)
        if expects in ("first key", "first value") and letter == _CLOSERS[self._open[-1]]:
            return self._leave(letter)
        if letter == '"':
            self._mode, self.run = "string", _IN_STRING
            self._was_key = expects in ("key", "first key")
            return True
        return "value" in expects and self._value(letter)

    def _value(self, letter: str) -> bool:
        if letter in _CLOSERS:
            return self._enter(letter)
        self._mode, self._expects = "scalar", "comma"
        return letter in "-0123456789tfn"

    def _enter(self, letter: str) -> bool:
        self._open.append(letter)
        self._expects = "first key" if letter == "{" else "first value"
        return len(self._open) <= MAX_DEPTH

    def _leave(self, letter: str) -> bool:
        if letter != _CLOSERS[self._open.pop()]:
            return False
        self._expects = "comma"
        self.done = not self._open
        return True
