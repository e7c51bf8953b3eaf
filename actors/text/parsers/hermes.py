"""Tool calls of the Hermes family, Qwen2.5 and Qwen3:

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

for each call, anywhere in the text. A call counts as soon as its object is complete.
"""

from __future__ import annotations

from typing import NoReturn

from .parser import Grammar
from .tool_parser import ToolParser


class HermesParser(ToolParser):
    markers = ("<tool_call>", "</tool_call>")
    begins = ("<tool_call>",)
    fillers = ("</tool_call>",)

    def _parse(self) -> Grammar[NoReturn]:
        again, called = "", False
        while True:
            yield from self._find(again, first=called)
            called = self._read((yield from self._object()))
            again = "" if called else self._undo()
