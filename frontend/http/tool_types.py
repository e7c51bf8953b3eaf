"""The JSON types that a tool's schema allows each of its parameters.

Some models write values without quotes; what a text is to become, its types say. They are found in
type, const, enum, anyOf, oneOf, allOf and references within the schema.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

ANY = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
_STRING = frozenset({"string"})
_MAX_DEPTH = 32


def parameter_types(tools: list[Any]) -> dict[str, dict[str, list[str]]]:
    """By function and parameter, without those that can only be strings.

    tools: as `check_tools` has let them through.
    """
    return {
        function["name"]: _types_of(function.get("parameters") or {})
        for function in (tool["function"] for tool in tools)
    }


def _types_of(parameters: dict[str, Any]) -> dict[str, list[str]]:
    schemas = _Schemas(parameters)
    found = {name: schemas.types(s) for name, s in parameters.get("properties", {}).items()}
    return {name: sorted(types) for name, types in found.items() if types != _STRING}


class _Schemas:
    """Those within one. Where they say nothing, refer to themselves or are too deep, any type is
    allowed; where they contradict themselves, a string.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._of_refs: dict[str, frozenset[str]] = {}

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return ANY
        types = _named(schema.get("type"))
        if isinstance(ref := schema.get("$ref"), str):
            types &= self._of_ref(ref, depth)
        if "const" in schema:
            types &= _of_values([schema["const"]])
        if isinstance(values := schema.get("enum"), list):
            types &= _of_values(values)
        for name in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(name), list):
                types &= self._any_of(choices, depth)
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                types &= self.types(part, depth + 1)
        return types or _STRING

    def _any_of(self, choices: list[Any], depth: int) -> frozenset[str]:
        return frozenset().union(*(self.types(choice, depth + 1) for choice in choices))

    def _of_ref(self, ref: str, depth: int) -> frozenset[str]:
        if ref not in self._of_refs:
            self._of_refs[ref] = self.types(self._resolve(ref), depth + 1)
        return self._of_refs[ref]

    def _resolve(self, ref: str) -> Any:
        """What a JSON pointer such as #/$defs/a refers to; None where that is nothing."""
        place, *path = ref.split("/")
        found: Any = self._root if place == "#" else None
        for part in path:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _named(given: Any) -> frozenset[str]:
    """A schema's type: a name or several. What is no type is any."""
    names = {given} if isinstance(given, str) else set()
    if isinstance(given, list):
        names = {name for name in given if isinstance(name, str)}
    if "number" in names:
        names.add("integer")
    return ANY & names or ANY


def _of_values(values: Iterable[Any]) -> frozenset[str]:
    return frozenset(_type_of(value) for value in values)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "object"
