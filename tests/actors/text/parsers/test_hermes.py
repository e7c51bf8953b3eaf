"""Calls in <tool_call> tags."""

from __future__ import annotations

from typing import Any

import pytest

PARSER = "hermes"
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"arguments": {}, "name": "g"}'
CALLS = [("f", '{"a": 1}'), ("g", "{}")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{F}\n</tool_call>", "", CALLS[:1]),
        (f"Let me see.\n<tool_call>{F}</tool_call>\n", "Let me see.\n", CALLS[:1]),
        (f"\n\n<tool_call>{F}</tool_call>", "\n\n", CALLS[:1]),
        (f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>", "", CALLS),
        (f"<tool_call>{F}</tool_call> and <tool_call>{G}</tool_call>", " and ", CALLS),
        (f"<tool_call>{F}", "", CALLS[:1]),
        (f"<tool_call>{F}<tool_call>{G}", "", CALLS),
        (f"<tool_call>{F}</tool_call></tool_call>", "", CALLS[:1]),
        (f"<tool_call>{F}</tool_call>\nDone.\n", "\nDone.\n", CALLS[:1]),
        (f"<tool_call>{F}\n</tool_", "\n</tool_", CALLS[:1]),
    ],
)
def test_calls(parse: Any, text: str, content: str, calls: Any) -> None:
    assert parse(text) == (content, calls)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":"}","b":"{"}',
        '{"a": "<tool_call>\\n{}</tool_call>"}',
        r'{"a": "\"\\", "b": "é🦊"}',
        '{ "a" : [ {"b": {}}, [], "]" ] , "c" : -1.50e+3 }',
        '{"a": 1, "a": 2, "big": 123456789012345678901234567890}',
        '{"a": "字🦊\u2028"}',
        "{\n}",
    ],
)
def test_arguments_come_as_they_were_written(parse: Any, arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert parse(text) == ("", [("f", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain < text <tool>, <tool_call and </tool_call>",
        "<tool_call>",
        f"<tool_call>{F[:-1]}",
        f"<tool_call>{F[:-1]}</tool_call>",
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": [1}]}</tool_call>',
        f"<tool_call>[{F}]</tool_call>",
        '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 300 + "0" + "}" * 301,
    ],
)
def test_what_is_no_call_is_content(parse: Any, text: str) -> None:
    assert parse(text) == (text, [])


def test_a_call_after_a_malformed_one(parse: Any) -> None:
    assert parse(f"<tool_call>oh<tool_call>{F}") == ("<tool_call>oh", CALLS[:1])
    assert parse(f"<tool_call><tool_call>{F}") == ("<tool_call>", CALLS[:1])
    broken = '<tool_call>{"name"}</tool_call>\n'
    assert parse(f"{broken}<tool_call>{F}</tool_call>") == (broken, CALLS[:1])
