"""Messages of a chat as a template may see them: parts joined, tool arguments decoded, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ringcast.actors.text.chat_messages import join_parts, parse_messages, split_parts
from ringcast.actors.text.chat_template import ChatTemplate
from ringcast.mq.errors import InvalidRequestError


def parse(messages: Any) -> list[dict[str, Any]]:
    return parse_messages(json.dumps(messages).encode())


def test_null_fields_are_left_out() -> None:
    messages = [
        {"role": "user", "content": "hi", "name": None},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    assert parse(messages) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ""},
    ]


def test_a_template_may_read_the_content_of_a_message_that_has_only_calls() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = parse([{"role": "assistant", "content": None, "tool_calls": [call]}])
    source = "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '<end>' }}{% endfor %}"
    assert ChatTemplate(source).render(messages, {}) == "assistant\n<end>"
    assert len(messages[0]["tool_calls"]) == 1


def test_arguments_of_tool_calls_become_objects() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "arguments": arguments}}

    calls = [call('{"x": 1}'), call({"y": 2}), call(""), {"type": "other"}]
    (message,) = parse([{"role": "assistant", "tool_calls": calls}])
    assert message["tool_calls"] == [call({"x": 1}), call({"y": 2}), call({}), {"type": "other"}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '[' + a + ']' }}", '[{"x":1, "y": [null]}]'),
        ("{{ a | tojson }}", '{"x": 1, "y": [null]}'),
        ("{% for k, v in a | items %}{{ k }}={{ v }};{% endfor %}", "x=1;y=[None];"),
        ("{{ a is mapping }} {{ a.x + 1 }}", "True 2"),
    ],
)
def test_templates_may_take_arguments_as_an_object_or_as_text(source: str, text: str) -> None:
    calls = [{"function": {"name": "f", "arguments": '{"x":1, "y": [null]}'}}]
    messages = parse([{"role": "assistant", "tool_calls": calls}])
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}" + source
    assert ChatTemplate(source).render(messages, {}) == text


def test_contents_of_either_kind() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = parse([{"role": "user", "content": parts}, {"role": "user", "content": "c"}])
    assert [message["content"] for message in join_parts(messages)] == ["a\nb", "c"]
    split = [message["content"] for message in split_parts(messages)]
    assert split == [parts, [{"type": "text", "text": "c"}]]


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "at least one message"),
        ({"role": "user"}, "messages", "a list"),
        ("hi", "messages", "a list"),
        (["hi"], "messages[0]", "an object with a role"),
        ([{"content": "hi"}], "messages[0].role", "a string such as"),
        ([{"role": 1, "content": "hi"}], "messages[0].role", "got 1"),
        ([{"role": "user"}], "messages[0].content", "got None"),
        (
            [{"role": "user", "content": "a"}, {"role": "tool", "content": 5}],
            "messages[1].content",
            "a string or a list of text parts, got 5",
        ),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]", '"type": "text"'),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
            "'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            "messages[0].content[0].text",
            "a string, got 1",
        ),
        ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls", "a list"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "no valid JSON",
        ),
    ],
)
def test_refusals_name_the_place(messages: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(messages)
    assert caught.value.param == param
    assert words in str(caught.value)
    assert param in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[", b'[{"role": "user", "content": "\\ud800"}]', b"\xff"])
def test_broken_json(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="valid JSON"):
        parse_messages(data)
