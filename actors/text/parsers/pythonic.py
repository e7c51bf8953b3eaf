"""Tool calls as a list of Python calls, before the first word of text (Llama 3.2, ToolACE):

    [f(a=1, b="x"), g()]

The list counts as a whole: one that isn't all calls is text. Arguments become JSON.
"""

from __future__ import annotations

from typing import NoReturn

from .parser import Grammar
from .python_calls import CallList, read_calls
from .tool_parser import ToolParser


class PythonicParser(ToolParser):
    begins_first = ("[",)

    def _parse(self) -> Grammar[NoReturn]:
        again, first = "", True
        while True:
            yield from self._find(again, first)
            calls = yield from self._list()
            for name, arguments in calls:
                self._call(name, arguments)
            first = bool(calls)
            again = "" if first else self._undo()

    def _list(self) -> Grammar[list[tuple[str, str]]]:
        """The calls of a list, none if it can't be one."""
        calls, parts = CallList(), ["["]
        while not calls.done:
            piece = yield calls.run
            if not calls.take(piece):
                return []
            parts.append(piece)
        return read_calls("".join(parts))
