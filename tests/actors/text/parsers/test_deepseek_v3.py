"""Calls in DeepSeek's marks."""

from __future__ import annotations

from typing import Any

import pytest

PARSER = "deepseek_v3"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
F = f'{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{CALL_END}'
G = f"{CALL}function{SEP}g\n```json\n{{}}\n```{CALL_END}"
CALLS = [("f", '{"a": 1}'), ("g", "{}")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{BEGIN}{F}{END}", "", CALLS[:1]),
        (f"{BEGIN}{F}\n{G}{END}", "", CALLS),
        (f"{BEGIN}{F}{G}{F}{END}\n", "", [*CALLS, CALLS[0]]),
        (f"I'll look.{BEGIN}\n{F}\n{END}", "I'll look.", CALLS[:1]),
        (f"{F}{END}So.", "So.", CALLS[:1]),
        (f"{BEGIN}{F}{END}```x```", "```x```", CALLS[:1]),
        (f"{BEGIN}{F.removesuffix(CALL_END)}", "", CALLS[:1]),
        (f"{BEGIN}{F}{END}{BEGIN}{G}{END}", "", CALLS),
    ],
)
def test_calls(parse: Any, text: str, content: str, calls: Any) -> None:
    assert parse(text) == (content, calls)


@pytest.mark.parametrize(
    "arguments", ['{"a":"```"}', '{ "a" : [ {"b": "}"} ],\n"c": 1e3 }', '{"é": "\\n🦊"}']
)
def test_arguments_come_as_they_were_written(parse: Any, arguments: str) -> None:
    text = f"{BEGIN}{CALL}function{SEP}f\n```json\n{arguments}\n```{CALL_END}{END}"
    assert parse(text) == ("", [("f", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        BEGIN,
        f"{BEGIN}{END}",
        f"{BEGIN}{F[: F.index('}')]}",
        f"{BEGIN}{F[: F.rindex('```')]}",
        f"{BEGIN}{F.replace('json', 'python')}{END}",
        f"{BEGIN}{F.replace('function', 'tool')}{END}",
        f"{BEGIN}{F.replace('1', 'tru')}{END}",
        f"{BEGIN}{F.replace('{', '[')}{END}",
        f"{BEGIN}{CALL}function{SEP}\n```json\n{{}}\n```{END}",
        f"{BEGIN}{CALL}f{SEP}{{}}{CALL_END}{END}",
        "<｜tool▁call▁begin",
    ],
)
def test_what_is_no_call_is_content(parse: Any, text: str) -> None:
    assert parse(text) == (text, [])


@pytest.mark.parametrize(
    "broken", [BEGIN, CALL, f"{CALL}function{SEP}f", f"{BEGIN}{CALL}<", "<｜tool"]
)
def test_a_call_after_a_malformed_one(parse: Any, broken: str) -> None:
    assert parse(f"{broken}{BEGIN}{F}{END}") == (broken, CALLS[:1])
