"""Calls as bare JSON objects."""

from __future__ import annotations

from typing import Any

import pytest

PARSER = "llama3_json"
TAG = "<|python_tag|>"
F = '{"name": "f", "parameters": {"a": 1}}'
G = '{"type": "function", "name": "g", "arguments": {}}'
CALLS = [("f", '{"a": 1}'), ("g", "{}")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (F, "", CALLS[:1]),
        (f"\n {F}\n", "", CALLS[:1]),
        (f"{TAG}{F}", "", CALLS[:1]),
        (f"{TAG} {F}; {G}", "", CALLS),
        (f"{F};{G};", "", CALLS),
        (f"{F}\n{G}", "", CALLS),
        (f"I look. {TAG}{F}", "I look. ", CALLS[:1]),
        (f"{F} and then {G}", f" and then {G}", CALLS[:1]),
        (f"{F} and then {TAG}{G}", " and then ", CALLS),
        (f"{F}; {{}}", " {}", CALLS[:1]),
    ],
)
def test_calls(parse: Any, text: str, content: str, calls: Any) -> None:
    assert parse(text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "The answer.",
        f"I would say {F}",
        "   ",
        ";",
        '{"answer": 42}',
        f'{{"answer": 42}} {F}',
        '{"name": "Bob", "age": 3}',
        '{"name": "f", "parameters": {}, "arguments": {}}',
        "{ x = 1; }",
        F[:-1],
        f"{TAG}print(1)",
        f"{TAG}",
        "<|python_t",
    ],
)
def test_what_is_no_call_is_content(parse: Any, text: str) -> None:
    assert parse(text) == (text, [])
