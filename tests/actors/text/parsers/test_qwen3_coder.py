"""Calls in XML, whose values get their types from the tools' schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

PARSER = "qwen3_coder"
TYPES = {
    "f": {"n": ["integer"], "x": ["number", "integer"], "o": ["object", "array"]},
    "g": {"b": ["boolean", "null"], "any": ["array", "integer", "null", "object", "string"]},
}
F = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
G = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
BARE_F = F.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
CALLS = [("f", '{"n": 1}'), ("g", "{}")]


def call(name: str, **arguments: str) -> str:
    said = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (F, "", CALLS[:1]),
        (f"Let me see.\n\n{F}\n", "Let me see.\n\n", CALLS[:1]),
        (f"{F}\n{G}", "", CALLS),
        (f"{F}{F}\n{G}\n", "", [CALLS[0], *CALLS]),
        (f"{F} and {G}", " and ", CALLS),
        (f"{F}\nDone.\n", "\nDone.\n", CALLS[:1]),
        (BARE_F, "", CALLS[:1]),
        (f"So:{BARE_F}\n</tool_call>{G}", "So:", CALLS),
        (F.removesuffix("\n</tool_call>"), "", CALLS[:1]),
        ("<tool_call><function=g></function></tool_call>", "", CALLS[1:]),
        ("<function= g ><parameter= b >True</parameter></function>", "", [("g", '{"b": true}')]),
        (f"{G}\n</tool_", "\n</tool_", CALLS[1:]),
    ],
)
def test_calls(parse: Any, text: str, content: str, calls: Any) -> None:
    assert parse(text) == (content, calls)


@pytest.mark.parametrize(
    ("name", "arguments", "wanted"),
    [
        ("f", {"n": "-3", "x": "2.5"}, {"n": -3, "x": 2.5}),
        ("f", {"x": "7", "y": "7"}, {"x": 7, "y": "7"}),
        ("f", {"n": "seven"}, {"n": "seven"}),
        ("f", {"o": '{"a": [1, {"b": null}]}'}, {"o": {"a": [1, {"b": None}]}}),
        ("f", {"o": '[\n  "x"\n]'}, {"o": ["x"]}),
        ("f", {"o": "[1"}, {"o": "[1"}),
        ("g", {"b": "false"}, {"b": False}),
        ("g", {"b": "None"}, {"b": None}),
        ("g", {"any": "5"}, {"any": 5}),
        ("g", {"any": "5 or so"}, {"any": "5 or so"}),
        ("unknown", {"n": "1"}, {"n": "1"}),
        (
            "g",
            {"code": "if a < b:\n    print('</p>')\n\n"},
            {"code": "if a < b:\n    print('</p>')\n\n"},
        ),
        ("g", {"s": ' "q" \\ é🦊 </parameter '}, {"s": ' "q" \\ é🦊 </parameter '}),
        ("g", {"s": "<tool_call><function=f>"}, {"s": "<tool_call><function=f>"}),
        ("g", {"s": ""}, {"s": ""}),
    ],
)
def test_values(parse: Any, name: str, arguments: Any, wanted: Any) -> None:
    content, [(called, said)] = parse(call(name, **arguments))
    assert (content, called) == ("", name)
    assert json.loads(said) == wanted
    assert [type(value) for value in json.loads(said).values()] == [*map(type, wanted.values())]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain < text <tool>, <function and </tool_call> </function>",
        "<tool_call>",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=f>\n<parameter=n>\n1",
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</function>\n</tool_call>",
        "<tool_call>f</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "<function=></function>",
        "<function=f\n></function>",
        "<function=f<g></function>",
        f"<function={'f' * 300}></function>",
        "<function=f>text</function>",
        "<function=f><parameter=>1</parameter></function>",
        call("f", n="1").replace("</function>", "<parameter=n>2</parameter></function>"),
    ],
)
def test_what_is_no_call_is_content(parse: Any, text: str) -> None:
    assert parse(text) == (text, [])


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>oh",
        "<tool_call>",
        "<tool_call>\n<function=",
        "<function=f>",
        "<function=f><",
        "<",
    ],
)
def test_a_call_after_a_malformed_one(parse: Any, broken: str) -> None:
    assert parse(broken + F) == (broken, CALLS[:1])
    assert parse(broken + BARE_F) == (broken.removesuffix("<tool_call>"), CALLS[:1])


def test_a_long_text_of_beginnings(parse: Any) -> None:
    text = "<tool_call>\n<function=f>\n<" * 500
    assert parse(text) == (text, [])
