"""Tool calls of Qwen3-Coder and of the models after it:

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

for each call, anywhere in the text; the outer marks may be missing. A value is all up to the next
</parameter>, but for a line break at either end. What it is in JSON, the tool's schema says.
"""

from __future__ import annotations

from .parser import Grammar
from .tool_parser import MarkedCallParser
from .typed_values import quoted, to_json

_CALL, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderParser(MarkedCallParser):
    markers = (_CALL, _END)
    begins = (_CALL, _FUNCTION)
    fillers = (_END,)
    typed = True

    def _call_behind(self, mark: str) -> Grammar[bool]:
        """A name and its parameters; whether they are a call."""
        if mark == _CALL and not (yield from self._tag(_FUNCTION)):
            return False
        name = yield from self._name(">")
        if not name:
            return False
        types = self._types.get(name, {})
        arguments: dict[str, str] = {}
        while (tag := (yield from self._tag(_PARAMETER, _FUNCTION_END))) == _PARAMETER:
            key = yield from self._name(">")
            if not key or key in arguments:
                return False
            value = yield from self._until(_PARAMETER_END)
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = to_json(value, types.get(key, ()))
        if not tag:
            return False
        pairs = [f"{quoted(key)}: {value}" for key, value in arguments.items()]
        self._call(name, f"{{{', '.join(pairs)}}}")
        return True
