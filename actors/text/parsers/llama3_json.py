"""Tool calls of Llama 3: all there is before the first word of text, or after <|python_tag|>.

    {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}

The arguments may be called "arguments", too.
"""

from __future__ import annotations

from typing import NoReturn

from .parser import Grammar
from .tool_parser import ToolParser

_KEYS = ("parameters", "arguments")


class Llama3JsonParser(ToolParser):
    markers = ("<|python_tag|>",)
    begins = ("<|python_tag|>",)
    begins_first = ("{",)
    fillers = (";",)

    def _parse(self) -> Grammar[NoReturn]:
        again, first = "", True
        while True:
            mark = yield from self._find(again, first)
            json = yield from self._object("{" if mark == "{" else "")
            first = self._read(json, _KEYS)
            again = "" if first else self._undo()
