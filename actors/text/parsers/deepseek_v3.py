"""Tool calls of DeepSeek V3 and R1, and of what was distilled from R1-0528:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>g
    ...
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

The marks around all calls may be missing.
"""

from __future__ import annotations

from .parser import Grammar
from .tool_parser import MarkedCallParser, is_object

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekV3Parser(MarkedCallParser):
    markers = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
    begins = (_CALLS, _CALL)
    fillers = (_CALL_END, _CALLS_END)

    def _call_behind(self, mark: str) -> Grammar[bool]:
        """A name and its arguments; whether they are a call."""
        if mark == _CALLS and not (yield from self._tag(_CALL)):
            return False
        if not (yield from self._tag(f"function{_SEPARATOR}")):
            return False
        name = yield from self._name("\n")
        if not name or not (yield from self._tag("```json")):
            return False
        arguments = yield from self._object()
        if arguments is None or not is_object(arguments) or not (yield from self._tag("```")):
            return False
        self._call(name, arguments)
        return True
