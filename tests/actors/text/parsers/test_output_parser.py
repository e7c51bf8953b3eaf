"""A choice's output through all its parsers; what doesn't depend on how the text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcast.actors.text.parsers import REASONING_PARSERS, TOOL_PARSERS, find_parser
from ringcast.actors.text.parsers.output_parser import (
    OutputParser,
    ParsedOutput,
    markers_of,
    opener_of,
    parse_output,
    put_together,
)
from ringcast.actors.text.parsers.parser import ToolCallStart
from ringcast.mq.messages import ParserSpec
from ringcast.mq.server_config import ServerConfig

CALL = '{"name": "f", "arguments": {"a": "}\\"{"}}'
# What texts are made of: every mark, parts of marks, calls, parts of calls, things like marks.
XML = "<function=f><parameter=a>1</parameter></function>"
XML_PARTS = ["<tool_call>", "</tool_call>", XML, XML[:20], XML[20:], "<function=g>", "</function>"]
XML_PARTS += ["<parameter=b>", "</parameter>", "<func", "tion=", ">"]
FENCED = f"function<｜tool▁sep｜>f\n```json\n{CALL}\n```"
PARTS = {
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>" + FENCED,
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        FENCED,
        FENCED[:12],
        FENCED[12:],
        "<｜tool▁",
        "call▁begin｜>",
        "```",
    ],
    "hermes": ["<tool_call>", "</tool_call>", "<tool", "_call>", "</", "<tool_calls>"],
    "llama3_json": ["<|python_tag|>", "<|python", "_tag|>", ";", '{"name": "g", "parameters": {}}'],
    "mistral": ["[TOOL_CALLS]", "[TOOL_", "CALLS]", "[", "]", ",", "g[ARGS]{}", 'g{"b": [1]}'],
    "pythonic": ["[f(a='x', b=[1]), g()]", "[", "]", "f(", ")", "a=", "'", '"', "1", ",", "\\"],
    "qwen3_coder": XML_PARTS,
    "qwen3_xml": XML_PARTS,
    "": [],
}
UNTYPED = ("pythonic", "qwen3_coder", "qwen3_xml")  # these don't write JSON
COMMON = [CALL, CALL[:20], CALL[20:], "{", "}", '"', "\\", " ", "\n", "x", "é🦊"]
COMMON += ["<think>", "</think>", "[THINK]", "[/THINK]"]
SPECS = [
    ParserSpec(tools, reasoning, parallel=parallel, types={"f": {"a": ["integer"]}})
    for tools, reasoning, parallel in itertools.product(
        ["", *TOOL_PARSERS], ["", *REASONING_PARSERS], [True, False]
    )
    if tools or (reasoning and parallel)
]


@st.composite
def texts(draw: st.DrawFn, tools: str) -> str:
    parts = st.sampled_from(COMMON + PARTS[tools] * 2) | st.text(
        st.characters(exclude_categories=["Cs"]), max_size=3
    )
    return "".join(draw(st.lists(parts, max_size=12)))


def prefixes(spec: ParserSpec, parts: list[str]) -> list[ParsedOutput]:
    """What is known after each part, and at the end."""
    parser = OutputParser(spec, "r", 1)
    deltas: list[Any] = []
    known = []
    for part in parts:
        deltas += parser.feed(part)
        known.append(put_together(deltas))
    deltas += parser.end()
    assert parser.called == any(isinstance(delta, ToolCallStart) for delta in deltas)
    return [*known, put_together(deltas)]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_is_known_depends_on_the_text_alone(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(SPECS))
    text = data.draw(texts(spec.tools))
    cuts = data.draw(st.sets(st.integers(0, len(text)), max_size=12))
    places = sorted({0, *cuts, len(text)})
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    letter_by_letter = prefixes(spec, list(text))
    known = prefixes(spec, parts)
    assert known == [*(letter_by_letter[place - 1] for place in places[1:]), letter_by_letter[-1]]
    whole = parse_output(text, spec, "r", 1)
    assert whole == known[-1]
    check(whole, text, spec)


def check(whole: ParsedOutput, text: str, spec: ParserSpec) -> None:
    """Nothing is invented, and nothing is lost where nothing was found."""
    for call in whole.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name in text
        assert call.arguments in text or spec.tools in UNTYPED
    if not whole.tool_calls and not spec.reasoning:
        assert whole.content == text
    assert spec.parallel or len(whole.tool_calls) <= 1
    assert len({call.id for call in whole.tool_calls}) == len(whole.tool_calls)


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{}}\n</tool_call>!'),
        ("hermes", '<think><tool_call>{"name"'),
        ("llama3_json", '<|python_tag|>{"name":"f","parameters":{}};'),
        ("mistral", '[TOOL_CALLS][{"name":"f","arguments":{}}]'),
        ("pythonic", "[f(a='\\''),g(b=\"\")] [1]"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>\n<\n</parameter></function>!"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}```!"),
    ],
)
def test_every_way_of_cutting_in_three(tools: str, text: str) -> None:
    spec = ParserSpec(tools, "qwen3")
    whole = parse_output(text, spec, "r", 1)
    for a, b in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert prefixes(spec, [text[:a], text[a:b], text[b:]])[-1] == whole


@pytest.mark.parametrize(
    "text", ["<tool</to", '{"a":1}', "[f(a=1)]", "[TOOL_[T", "</<|p", "<fun<tool"]
)
@pytest.mark.parametrize("tools", sorted(TOOL_PARSERS))
def test_every_way_of_cutting(tools: str, text: str) -> None:
    spec = ParserSpec(tools)
    whole = parse_output(text, spec, "r", 1)
    for mask in range(1 << (len(text) - 1)):
        places = [0, *(i for i in range(1, len(text)) if mask >> (i - 1) & 1), len(text)]
        parts = [text[a:b] for a, b in itertools.pairwise(places)]
        assert prefixes(spec, parts)[-1] == whole


def test_reasoning_then_content_then_calls() -> None:
    text = f"<think>I <tool_call>{CALL}</think>So:<tool_call>{CALL}</tool_call>"
    output = parse_output(text, ParserSpec("hermes", "qwen3"), "r", 1)
    assert (output.reasoning, output.content) == (f"I <tool_call>{CALL}", "So:")
    assert [call.name for call in output.tool_calls] == ["f"]


def test_only_the_first_call_is_given() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 3 + "end"
    alone = parse_output(text, ParserSpec("hermes", parallel=False), "r", 1)
    every = parse_output(text, ParserSpec("hermes"), "r", 1)
    assert alone.tool_calls == every.tool_calls[:1]
    assert alone.content == every.content == "end"


def test_ids_are_of_the_request_and_the_choice() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 2
    ids = [
        call.id
        for request_id, choice in [("r", 0), ("r", 1), ("s", 0)]
        for call in parse_output(text, ParserSpec("hermes"), request_id, choice).tool_calls
    ]
    assert len(set(ids)) == 6
    assert all(name.startswith("chatcmpl-tool-") for name in ids)
    assert int(ids[0].removeprefix("chatcmpl-tool-"), 16)
    again = parse_output(text, ParserSpec("hermes"), "r", 0).tool_calls
    assert [call.id for call in again] == ids[:2]


def test_marks() -> None:
    assert markers_of(ParserSpec()) == frozenset()
    assert opener_of(ParserSpec("hermes")) == ""
    spec = ParserSpec("mistral", "qwen3")
    assert opener_of(spec) == "<think>"
    assert markers_of(spec) == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"}


@pytest.mark.parametrize(
    ("option", "registry"),
    [("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)],
)
def test_the_options_have_what_the_registries_have(option: str, registry: dict[str, str]) -> None:
    names, _ = get_args(get_type_hints(ServerConfig)[option])
    assert list(get_args(names)) == list(registry)
    for name in registry:
        find_parser(registry, name)
