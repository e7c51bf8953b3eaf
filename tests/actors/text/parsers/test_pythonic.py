"""Calls as a list of Python's, and their literals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcast.actors.text.parsers.python_calls import read_calls
from ringcast.actors.text.parsers.pythonic import PythonicParser

PARSER = "pythonic"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[f()]", "", [("f", "{}")]),
        ("\n [f(a=1)]\n", "", [("f", '{"a": 1}')]),
        ("[f(a='x', b = \"]\"), m.g ( ) ,]", "", [("f", '{"a": "x", "b": "]"}'), ("m.g", "{}")]),
        ("[f(a=1)]\nThere.", "\nThere.", [("f", '{"a": 1}')]),
        ("[f()] [g()]", "", [("f", "{}"), ("g", "{}")]),
    ],
)
def test_calls(parse: Any, text: str, content: str, calls: Any) -> None:
    assert parse(text) == (content, calls)


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("-1", -1),
        ("+2.5e3", 2500.0),
        ("0x1F", 31),
        ("1_000", 1000),
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("[1, 'a', [], (2,), {'k': {}}]", [1, "a", [], [2], {"k": {}}]),
        ("()", []),
        ("''", ""),
        ('"it\'s"', "it's"),
        (r"'it\'s \n \u00e9 \d'", "it's \n é \\d"),
        ('"""a "quoted"\nline"""', 'a "quoted"\nline'),
        ("''''x''y'''", "'x''y"),
        ("'字🦊'", "字🦊"),
    ],
)
def test_literals(parse: Any, literal: str, value: Any) -> None:
    content, [(name, arguments)] = parse(f"[f(a={literal}, b=[{literal}])]")
    assert (content, name) == ("", "f")
    assert json.loads(arguments) == {"a": value, "b": [value]}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[1] See there.",
        "[link](http://x)",
        "[ x ]",
        "f(a=1)",
        "Then [f(a=1)]",
        "[f(a=1)",
        "[f(a=1]",
        "[f(a=1), g]",
        "[f(a=1) g()]",
        "[f(1)]",
        "[f(a=1, a=2)]",
        "[f(a=g())]",
        "[f(a=x)]",
        "[f(a=1+2)]",
        "[f(a={1})]",
        "[f(a={1: 2})]",
        "[f(a='x)]",
        "[f(a='x\n')]",
        "[f(a=1 2)]",
        "[f(a=,)]",
        "[f(,)]",
        "[f(a=--1)]",
        "[f(a=-'x')]",
        "[f(a=01)]",
        "[f(a=1j)]",
        "[f(a=1e999)]",
        "[f(a='\\ud800')]",
        "[f(a='\\N{nothing}')]",
        "[f(a='\0')]",
        "[f(a=r'x')]",
        "[f(a=b'x')]",
        "[f(a='x' 'y')]",
        "[f(a=lambda: 1)]",
        "[f(a=" + "9" * 5000 + ")]",
        "[f(a=" + "[" * 100 + "]" * 100 + ")]",
        "[f(a=" + "-" * 100_000 + "1)]",
        "[f(a=$)]",
        "[5f()]",
        "[f()",
    ],
)
def test_what_is_no_call_is_content(parse: Any, text: str) -> None:
    assert parse(text) == (text, [])


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
LITERALS = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(
    st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), LITERALS, max_size=4)
)
def test_whatever_python_writes_is_read(arguments: dict[str, Any]) -> None:
    said = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    text = f"[f({said})]"
    ((name, got),) = read_calls(text)
    assert (name, json.loads(got)) == ("f", arguments)
    parser = PythonicParser("r/0")
    deltas = [delta for letter in text for delta in parser.feed(letter)]
    assert [delta.text for delta in deltas[1:]] == [got]  # type: ignore[union-attr]
    assert parser.end() == []
