"""A list of Python calls with literal arguments: where it ends, and what it says.

Nothing is run and nothing of it goes through Python's own parser but single strings and numbers:
that parser can be brought down by deep nesting, and what comes here is whatever a model writes.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

MAX_DEPTH = 60
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_IN_STRING = re.compile(r"[^\"'\\\n]+")
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>\"{3}(?:[^\\]|\\.)*?\"{3} | '{3}(?:[^\\]|\\.)*?'{3}
        | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*')
    | (?P<number>0[xob][\da-f_]+ | (?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[+-]?\d+)?)
    | (?P<name>[^\W\d][\w.]*)
    | (?P<sign>[+-])
    | (?P<mark>[\[\](){},:=])
    )""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


class CallList:
    """Finds the end of a list whose "[" has been read. Fails as soon as it can't be one of calls.

    Between the list's brackets there is

        expects    takes                            then expects
        name       letter or _                      open
        open       more of the name, blanks, "("    (within the call's brackets, anything), comma
        comma      ","                              name, or the end
        comma      "]"                              nothing: done

    done: the list is complete. run: what may be taken in one piece now.
    """

    __slots__ = ("_escaped", "_expects", "_num_calls", "_num_quotes", "_open", "_quote", "done")

    def __init__(self) -> None:
        self.done = False
        self._expects = "name"
        self._num_calls = 0
        self._open: list[str] = []  # brackets within the list
        self._quote = ""  # of the string we are in: one, or three
        self._num_quotes = 0  # in a row, up to here: at a string's beginning or its end
        self._escaped = False

    @property
    def run(self) -> re.Pattern[str] | None:
        inside = self._quote and not self._escaped and not self._num_quotes
        return _IN_STRING if inside else None

    def take(self, piece: str) -> bool:
        """Take the next character, or a run of them; False if that can't be."""
        if self._quote:
            return self._string(piece)
        if not self._open:
            return self._between(piece)
        if piece in "\"'":
            self._quote, self._num_quotes = piece, 1
        elif piece in _CLOSERS:
            self._open.append(piece)
        elif piece in _CLOSERS.values():
            return piece == _CLOSERS[self._open.pop()]
        return len(self._open) <= MAX_DEPTH

    def _between(self, letter: str) -> bool:
        if letter.isspace():
            if self._expects == "more name":
                self._expects = "open"
            return True
        if self._expects == "comma" and letter == ",":
            self._expects = "name"
            return True
        if letter == "]" and self._num_calls and self._expects in ("name", "comma"):
            self.done = True
            return True
        if self._expects == "more name" and (letter.isalnum() or letter in "_."):
            return True
        if self._expects == "name" and (letter.isalpha() or letter == "_"):
            self._expects = "more name"
            return True
        if self._expects in ("more name", "open") and letter == "(":
            self._open.append(letter)
            self._num_calls += 1
            self._expects = "comma"
            return True
        return False

    def _string(self, piece: str) -> bool:
        if self._escaped:
            self._escaped = False
            return True
        if piece == self._quote[0]:
            return self._quotes()
        if self._num_quotes == 2 and len(self._quote) == 1:  # it was an empty string
            self._quote, self._num_quotes = "", 0
            return self.take(piece)
        self._num_quotes = 0
        self._escaped = piece == "\\"
        return piece != "\n" or len(self._quote) == 3

    def _quotes(self) -> bool:
        """One more quote of the kind that the string began with."""
        beginning = self._num_quotes > 0 and len(self._quote) == 1
        self._num_quotes += 1
        if beginning:
            if self._num_quotes == 3:
                self._quote, self._num_quotes = self._quote * 3, 0
        elif self._num_quotes == len(self._quote):
            self._quote, self._num_quotes = "", 0
        return True


def read_calls(text: str) -> list[tuple[str, str]]:
    """Names and arguments, as JSON objects, of a list of calls; none if anything in it is none."""
    try:
        calls = _Reader(text).calls()
        said = [
            (name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
            for name, arguments in calls
        ]
        "".join(arguments for _, arguments in said).encode()  # which a lone surrogate can't be
    except (ValueError, SyntaxError):
        return []
    return said


class _Reader:
    """Reads by recursive descent, which CallList has found to be not too deep. Raises ValueError
    where the text is no list of calls, SyntaxError where a string or number is none.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._kind = self._token = ""
        self._next()

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        self._expect("[")
        calls = []
        while self._token != "]" or self._kind != "mark":
            calls.append(self._call())
            self._comma_before("]")
        return calls

    def _call(self) -> tuple[str, dict[str, Any]]:
        name = self._name()
        self._expect("(")
        arguments: dict[str, Any] = {}
        while not self._skip(")"):
            key = self._name()
            self._expect("=")
            if key in arguments:
                raise ValueError(f"{key} is given twice")
            arguments[key] = self._value()
            self._comma_before(")")
        return name, arguments

    def _value(self) -> Any:
        kind, token = self._kind, self._token
        if kind == "mark" and token in "[(":
            return self._list(_CLOSERS[token])
        if kind == "mark" and token == "{":
            return self._dict()
        self._next()
        if kind == "sign" and self._kind == "number":
            number = _literal(self._token)
            self._next()
            return -number if token == "-" else number
        if kind == "name" and token in _WORDS:
            return _WORDS[token]
        if kind in ("string", "number"):
            return _literal(token)
        raise ValueError(f"{token!r} is no literal")

    def _list(self, closer: str) -> list[Any]:
        self._next()
        items = []
        while not self._skip(closer):
            items.append(self._value())
            self._comma_before(closer)
        return items

    def _dict(self) -> dict[str, Any]:
        self._next()
        items: dict[str, Any] = {}
        while not self._skip("}"):
            if self._kind != "string":
                raise ValueError("a key must be a string")
            key = self._value()
            self._expect(":")
            items[key] = self._value()
            self._comma_before("}")
        return items

    def _name(self) -> str:
        if self._kind != "name":
            raise ValueError(f"{self._token!r} is no name")
        name = self._token
        self._next()
        return name

    def _comma_before(self, closer: str) -> None:
        """A comma, or the closer, which stays."""
        if not self._skip(",") and not (self._kind == "mark" and self._token == closer):
            raise ValueError(f"{self._token!r} is no comma")

    def _skip(self, mark: str) -> bool:
        found = self._kind == "mark" and self._token == mark
        if found:
            self._next()
        return found

    def _expect(self, mark: str) -> None:
        if not self._skip(mark):
            raise ValueError(f"{self._token!r} is no {mark!r}")

    def _next(self) -> None:
        found = _TOKEN.match(self._text, self._place)
        if found is None:
            if self._text[self._place :].strip():
                raise ValueError("no token of a call")
            self._kind = self._token = ""
            return
        self._place = found.end()
        self._kind = found.lastgroup or ""
        self._token = found[self._kind]


def _literal(token: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python doesn't know
        return ast.literal_eval(token)
