"""Values that models write without quotes, as JSON of the types that a schema allows."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from .tool_parser import read_json

_INTEGER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.0+)?", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)


def to_json(text: str, types: Collection[str]) -> str:
    """The text as the first of null, boolean, integer, number, object and array that is among the
    types and that it can be; else as a string.

    Null and booleans may be written as in Python, too: chat templates show models such.
    """
    said = text.strip()
    word = said.lower()
    if "null" in types and word in ("null", "none"):
        return "null"
    if "boolean" in types and word in ("true", "false"):
        return word
    if "integer" in types and _INTEGER.fullmatch(said):
        return said
    if "number" in types and _NUMBER.fullmatch(said):
        return said
    for kind, name, begin in ((dict, "object", "{"), (list, "array", "[")):
        if name in types and said.startswith(begin) and isinstance(read_json(said), kind):
            return said
    return quoted(text)


def quoted(text: str) -> str:
    """A JSON string."""
    return msgspec.json.encode(text).decode()
