"""Texts as JSON of the types that there may be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcast.actors.text.parsers.typed_values import to_json

TYPES = ["null", "boolean", "integer", "number", "object", "array", "string"]


@pytest.mark.parametrize(
    ("text", "types", "said"),
    [
        ("12", "integer", "12"),
        (" -12\n", "integer", "-12"),
        ("5.0", "integer", "5.0"),
        ("5.5", "integer", '"5.5"'),
        ("012", "integer", '"012"'),
        ("1_000", "integer", '"1_000"'),
        ("٣", "integer", '"٣"'),
        ("9" * 5000, "integer", "9" * 5000),
        ("1.5e3", "number", "1.5e3"),
        ("NaN", "number", '"NaN"'),
        (".5", "number", '".5"'),
        ("TRUE", "boolean", "true"),
        ("False", "boolean", "false"),
        ("1", "boolean", '"1"'),
        ("null", "null", "null"),
        ("None", "null string", "null"),
        ("null", "string", '"null"'),
        ("true", "string", '"true"'),
        (" 5 ", "string", '" 5 "'),
        ("5", "string integer", "5"),
        ("five", "string integer", '"five"'),
        ('{"a": 1}', "object", '{"a": 1}'),
        ('{"a": 1}', "array", r'"{\"a\": 1}"'),
        ("[]", "object", '"[]"'),
        ("[1, [2]]", "array", "[1, [2]]"),
        ("{'a': 1}", "object", "\"{'a': 1}\""),
        ("[" * 5000, "array", '"' + "[" * 5000 + '"'),
        ("1", "", '"1"'),
    ],
)
def test_values(text: str, types: str, said: str) -> None:
    assert to_json(text, types.split()) == said


@given(
    st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["1", "{}", "[0]", "None"]),
    st.lists(st.sampled_from(TYPES)),
)
def test_whatever_comes_is_json_of_one_of_the_types_or_the_string(text: str, types: Any) -> None:
    value = json.loads(to_json(text, types))
    if isinstance(value, str):
        assert value == text
        return
    kinds = {
        "null": type(None),
        "boolean": bool,
        "integer": int,
        "number": int | float,
        "object": dict,
        "array": list,
    }
    assert any(isinstance(value, kinds[name]) for name in types if name != "string")


@settings(max_examples=30)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=9,
    )
)
def test_what_a_template_shows_is_read_back(value: Any) -> None:
    shown = json.dumps(value) if isinstance(value, dict | list) else str(value)
    assert json.loads(to_json(shown, TYPES)) == value
