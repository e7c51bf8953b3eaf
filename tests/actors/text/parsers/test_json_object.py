"""The end of a JSON object is found where it is, and what can't become one fails at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcast.actors.text.parsers.json_object import MAX_DEPTH, JsonObject

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


def take(text: str) -> int:
    """How many characters were taken; the object is complete only with the last."""
    scanner = JsonObject()
    for place, letter in enumerate(text):
        if scanner.done or not scanner.take(letter):
            return place
    return len(text)


@given(
    st.dictionaries(st.text(max_size=4), VALUES, max_size=4),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
def test_the_end_of_any_object(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert take(text) == take(text + "}") == len(text)
    scanner = JsonObject()
    *before, last = [scanner.take(letter) and scanner.done for letter in text]
    assert not any(before)
    assert last


@pytest.mark.parametrize(
    ("text", "num_taken"),
    [
        ("[", 0),
        (" {", 0),
        ("{,", 1),
        ("{a", 1),
        ("{1", 1),
        ('{"a",', 4),
        ('{"a"}', 4),
        ('{"a": x', 6),
        ('{"a": }', 6),
        ('{"a": 1 2', 8),
        ('{"a": 1]', 7),
        ('{"a": 1,}', 8),
        ('{"a": [1,]', 9),
        ('{"a": [}', 7),
        ('{"a\n', 3),
        (r'{"a\x', 4),
        ('{"a": "b" "', 10),
        ('{"a": {} {', 9),
        ('{"a": ' + "[" * MAX_DEPTH, 6 + MAX_DEPTH - 1),
    ],
)
def test_failures_come_at_once(text: str, num_taken: int) -> None:
    assert take(text) == num_taken


def test_a_run_is_taken_in_one_piece() -> None:
    scanner = JsonObject()
    assert scanner.run is None
    for letter in '{"':
        assert scanner.take(letter)
    assert scanner.run is not None
    run = scanner.run.match('long text 🦊" {')
    assert run is not None
    assert run[0] == "long text 🦊"
    assert scanner.take(run[0])
    assert scanner.take('"')
    assert scanner.run is None
