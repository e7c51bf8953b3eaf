"""Calls after [TOOL_CALLS]."""

from __future__ import annotations

from typing import Any

import pytest

from ringcast.actors.text.parsers.mistral import MistralParser

PARSER = "mistral"
T = "[TOOL_CALLS]"
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g.h-1", "arguments": {}, "id": "x"}'
CALLS = [("f", '{"a": 1}'), ("g.h-1", "{}")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{T} [{F}]", "", CALLS[:1]),
        (f"{T}[{F}, {G}]\n", "", CALLS),
        (f"{T} [\n{F} ,\n{G}\n]", "", CALLS),
        (f"Yes.{T}[{F}]", "Yes.", CALLS[:1]),
        (f"{T}[{F}] So.", " So.", CALLS[:1]),
        (f"{T}[{F}", "", CALLS[:1]),
        (f"{T}[{F}, 7]", ", 7]", CALLS[:1]),
        (f"{T}[{F} {G}]", f" {G}]", CALLS[:1]),
        (f'{T}f{{"a": 1}}', "", CALLS[:1]),
        (f'{T}f[ARGS]{{"a": 1}}{T}g.h-1[CALL_ID]x1[ARGS]{{}}', "", CALLS),
        (f'{T} f {{"a": 1}}\n{T}g.h-1{{}}\n', "", CALLS),
        (f"Yes.{T}g.h-1{{}}No.", "Yes.No.", CALLS[1:]),
    ],
)
def test_calls(parse: Any, text: str, content: str, calls: Any) -> None:
    assert parse(text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALL] [] [TOOL_CALLS",
        T,
        f"{T}[]",
        f"{T}[{F[:-1]}]",
        f"{T} Well, f is",
        f"{T}f[ARGS]",
        f"{T}f[ARGS]{{a}}",
        f"{T}f[ARGS][1]",
        f'{T}f[ARGS]{{"a": tru}}',
        f"{T}{{}}",
        f"{T}f g{{}}",
        f"{T}{'f' * 129}{{}}",
        f"{T}{'f ' * 200}{{}}",
    ],
)
def test_what_is_no_call_is_content(parse: Any, text: str) -> None:
    assert parse(text) == (text, [])


def test_ids_are_nine_letters_and_digits() -> None:
    ids = [MistralParser(key).call_id(i) for key in ("r-1/0", "r-1/1", "r-2/0") for i in range(3)]
    assert len(set(ids)) == 9
    assert all(len(name) == 9 and name.isalnum() and name.isascii() for name in ids)
    assert MistralParser("r-1/0").call_id(0) == ids[0]
