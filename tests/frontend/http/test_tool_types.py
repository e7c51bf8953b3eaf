"""What types parameters may have, by their schemas."""

from __future__ import annotations

from typing import Any

import pytest

from ringcast.frontend.http.tool_types import ANY, parameter_types

DEFS = {
    "color": {"enum": ["red", "green"]},
    "point": {"type": "object", "properties": {"x": {"type": "number"}}},
    "tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/tree"}}, {"type": "integer"}]},
    "self": {"$ref": "#/$defs/self"},
    "a/b~%": {"type": "null"},
}


def types(schema: Any) -> set[str]:
    """The types of a parameter with this schema."""
    parameters = {"type": "object", "properties": {"p": schema}, "$defs": DEFS}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return set(parameter_types([tool])["f"].get("p", ["string"]))


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"type": "string"}, "string"),
        ({"type": "integer"}, "integer"),
        ({"type": "number"}, "number integer"),
        ({"type": ["boolean", "null"]}, "boolean null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string null"),
        ({"oneOf": [{"type": "array"}, {"type": "object"}], "type": "array"}, "array"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "integer"),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]}, " ".join(sorted(ANY))),
        ({"enum": [1, 2]}, "integer"),
        ({"type": "number", "enum": [1, 2.5]}, "integer number"),
        ({"const": False}, "boolean"),
        ({"$ref": "#/$defs/color"}, "string"),
        ({"$ref": "#/$defs/point"}, "object"),
        ({"$ref": "#/$defs/tree"}, "array integer"),
        ({"$ref": "#/$defs/a~1b~0%25"}, "null"),
        ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, "object null"),
        ({"type": "string", "enum": [1]}, "string"),  # nothing could be that
        ({"anyOf": []}, "string"),
    ],
)
def test_types(schema: Any, names: str) -> None:
    assert types(schema) == set(names.split())


def nested(depth: int) -> Any:
    return {"anyOf": [nested(depth - 1)]} if depth else {"type": "integer"}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"description": "whatever"},
        {"type": "floaty"},
        {"type": 7},
        {"$ref": "#/$defs/self"},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "other.json#/a"},
        {"$ref": "#/properties/p/$ref/0"},
        {"$ref": 5, "enum": 5, "anyOf": 5, "allOf": {}},
        nested(500),
    ],
)
def test_what_says_nothing_may_be_anything(schema: Any) -> None:
    assert types(schema) == ANY


def test_references_that_multiply_are_followed_once() -> None:
    refs = [{"$ref": f"#/$defs/{i}"} for i in range(60)]
    parameters = {
        "properties": {"p": refs[0]},
        "$defs": {str(i): {"allOf": refs} for i in range(60)} | {"0": {"allOf": refs[1:]}},
    }
    assert (
        set(parameter_types([{"function": {"name": "f", "parameters": parameters}}])["f"]["p"])
        == ANY
    )


def test_tools_without_parameters() -> None:
    tools = [{"function": {"name": "f"}}, {"function": {"name": "g", "parameters": None}}]
    assert parameter_types(tools) == {"f": {}, "g": {}}
