"""Tool calls of the Hermes family, Qwen2.5 and Qwen3:

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

for each call, anywhere in the text. A call counts as soon as its object is complete.
"""

from __future__ import annotations

from .parser import Grammar
from .tool_parser import MarkedCallParser


class HermesParser(MarkedCallParser):
    markers = ("<tool_call>", "</tool_call>")
    begins = ("<tool_call>",)
    fillers = ("</tool_call>",)

    def _call_behind(self, mark: str) -> Grammar[bool]:
        return self._read((yield from self._object()))
