"""Reasoning before the content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcast.actors.text.parsers.deepseek_r1 import DeepSeekR1Parser
from ringcast.actors.text.parsers.mistral_think import MistralThinkParser
from ringcast.actors.text.parsers.output_parser import put_together
from ringcast.actors.text.parsers.qwen3 import Qwen3Parser
from ringcast.actors.text.parsers.think import ThinkParser


def read(kind: type[ThinkParser], text: str) -> tuple[str, str]:
    """Reasoning and content, whichever way it is cut."""
    results = set()
    for size in (1, 2, 5, len(text) + 1):
        parser = kind()
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        deltas = [delta for part in parts for delta in parser.feed(part)] + parser.end()
        output = put_together(deltas)
        assert output.tool_calls == []
        results.add((output.reasoning, output.content))
    (result,) = results
    return result


@pytest.mark.parametrize(
    ("text", "both"),
    [
        ("<think>\nso\n</think>\n\nYes", ("\nso\n", "\n\nYes")),
        (" \n<think>so</think>Yes", ("so", "Yes")),
        ("<think>so", ("so", "")),
        ("<think>so</thin", ("so</thin", "")),
        ("<think></think>", ("", "")),
        ("<think>a <think> b</think>c</think>d<think>e", ("a <think> b", "c</think>d<think>e")),
        ("<think>a < b </ c</think>", ("a < b </ c", "")),
        ("", ("", "")),
    ],
)
def test_both(text: str, both: tuple[str, str]) -> None:
    assert read(DeepSeekR1Parser, text) == both
    assert read(Qwen3Parser, text) == both


@pytest.mark.parametrize(
    ("text", "end"),
    [("so</think>Yes", 2), ("so", 2), (" <thin", 6), ("</think>Yes", 0), (" \n", 2), (" x", 2)],
)
def test_without_the_opener(text: str, end: int) -> None:
    reasoning, content = text[:end], text[end:].removeprefix("</think>")
    assert read(DeepSeekR1Parser, text) == (reasoning, content)
    assert read(Qwen3Parser, text) == ("", text)


@pytest.mark.parametrize(
    ("text", "both"),
    [
        ("[THINK]so[/THINK]Yes", ("so", "Yes")),
        (" [THINK]a <think> [/TH", ("a <think> [/TH", "")),
        ("a[THINK]b[/THINK]", ("", "a[THINK]b[/THINK]")),
        ("<think>so</think>", ("", "<think>so</think>")),
    ],
)
def test_marks_of_mistral(text: str, both: tuple[str, str]) -> None:
    assert read(MistralThinkParser, text) == both


@given(st.lists(st.sampled_from(["<think>", "</think>", "</think", "<", " ", "a"]), max_size=8))
def test_any_text(parts: list[str]) -> None:
    text = "".join(parts)
    reasoning, content = read(Qwen3Parser, text)
    if not text.lstrip().startswith("<think>"):
        assert (reasoning, content) == ("", text)
        return
    rest = text.lstrip().removeprefix("<think>")
    before, _, after = rest.partition("</think>")
    assert (reasoning, content) == (before, after)
