"""Chat templates against transformers' own rendering, and what the sandbox refuses."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from ringcast.actors.text.chat_template import ChatTemplate, ChatTemplates
from ringcast.actors.text.text_tokenizer import TextTokenizer
from ringcast.mq.errors import InvalidRequestError

NOON = datetime(2024, 7, 26, 12, 0)

CHATML = """\
{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\n\nToday Date: " + date_string + "\n\n" + system + "<|eot|>" }}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'assistant' %}
        {{- '<|head|>' + message['role'] + '<|/head|>\n\n' }}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {{- raise_exception("no tools here") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\n\n' }}
{%- endif %}"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(num_user=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.num_user = ns.num_user + 1 %}
    {%- endif %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' + call.function.name + ' ' }}
            {{- call.function.arguments | tojson + '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
    {%- if ns.num_user > 50 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ ' ' + message['content'] + eos_token }}{% endif %}
{%- endfor %}"""

PARTS = """\
{% for message in messages %}{{ message['role'] }}:
{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}
{% endfor %}<end>
{% endfor %}"""

ASK = [{"role": "user", "content": " Hi <b>&\n ü🦊 "}]
CHAT = [
    {"role": "system", "content": "Be kind. "},
    *ASK,
    {"role": "assistant", "content": "Hello "},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "où <il> pleut", "parameters": {"a": [1]}},
    }
]
CALL = [
    *ASK,
    {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
    },
    {"role": "tool", "content": "rain"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
Messages = list[dict[str, Any]]


def render(source: str, messages: Messages, continues: bool = False, **variables: Any) -> str:
    """As a request without options of its own."""
    common = {"tools": None, "documents": None, "add_generation_prompt": False}
    template = ChatTemplate(source, lambda: NOON)
    return template.render(messages, SPECIAL | common | variables, continues)


@pytest.fixture(scope="module")
def reference(byte_level: TextTokenizer) -> Any:
    """transformers' tokenizer around the same special tokens."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=byte_level.backend, **SPECIAL)


@pytest.mark.parametrize(
    ("source", "messages", "variables"),
    [
        (CHATML, ASK, {}),
        (CHATML, ASK, {"add_generation_prompt": True}),
        (CHATML, CHAT, {"add_generation_prompt": True}),
        (CHATML, CHAT, {"continue_final_message": True}),
        (LLAMA3, CHAT, {"add_generation_prompt": True}),
        (LLAMA3, ASK, {"date_string": "1 May 2025"}),
        (LLAMA3, CHAT, {"continue_final_message": True}),
        (QWEN, CALL, {"tools": TOOLS, "add_generation_prompt": True}),
        (QWEN, ASK, {"add_generation_prompt": True, "enable_thinking": False}),
        (QWEN, CHAT, {"continue_final_message": True}),
        (MISTRAL, CHAT[1:], {}),
        (MISTRAL, CHAT[1:], {"continue_final_message": True}),
        (MISTRAL, [*CHAT[1:], *ASK], {"bos_token": "<other>"}),
    ],
)
def test_as_transformers_renders(
    reference: Any, source: str, messages: Messages, variables: dict[str, Any]
) -> None:
    expected = reference.apply_chat_template(
        messages, chat_template=source, tokenize=False, **variables
    )
    continues = variables.pop("continue_final_message", False)
    assert render(source, messages, continues, **variables) == expected


@pytest.mark.parametrize("variables", [{}, {"add_generation_prompt": True}])
def test_smollm2(smollm2: TextTokenizer, reference: Any, variables: dict[str, Any]) -> None:
    source = smollm2.chat_template
    assert source is not None
    for messages in (ASK, CHAT):
        expected = reference.apply_chat_template(
            messages, chat_template=source, tokenize=False, **variables
        )
        assert render(source, messages, **variables) == expected


def test_parts_are_joined_for_templates_that_take_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for source in (CHATML, LLAMA3, QWEN, MISTRAL):
        assert not ChatTemplate(source).takes_parts
        assert "one\ntwo" in render(source, [{"role": "user", "content": parts}])


def test_strings_become_parts_for_templates_that_take_parts() -> None:
    assert ChatTemplate(PARTS).takes_parts
    as_string = render(PARTS, [{"role": "user", "content": "one"}])
    assert as_string == "user:\none<end>\n"
    either = "{% if message['content'] is string %}" + PARTS + "{% endif %}"
    assert not ChatTemplate(either).takes_parts


def test_a_message_in_parts_can_be_continued() -> None:
    message = {"role": "assistant", "content": "So "}
    assert render(PARTS, [message], True) == "assistant:\nSo "


def test_functions_of_the_environment() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\n", ASK) == "a\nb\n"
    assert render("{{ strftime_now('%d %b %Y') }}", ASK) == "26 Jul 2024"
    assert render("{{ {'b': 'é<', 'a': 1} | tojson }}", ASK) == '{"b": "é<", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}", ASK) == "[\n  1\n]"
    ordered = "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}"
    assert render(ordered, ASK) == '{"a":2,"b":1}'
    assert render("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}", ASK) == "1"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('only users may speak') }}", "only users may speak"),
        ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'"),
        ("{{ 'a' + none }}", "TypeError"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(source, ASK)
    assert "the chat template failed" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("source", "messages"),
    [("nothing of it", ASK), (CHATML, [{"role": "assistant", "tool_calls": []}])],
)
def test_what_cannot_be_continued(source: str, messages: Messages) -> None:
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        render(source, messages, True)


def test_each_template_is_compiled_once() -> None:
    templates = ChatTemplates()
    assert templates.get(CHATML) is templates.get(CHATML)
    with pytest.raises(InvalidRequestError, match=r"error in line 2: .*'endfor'"):
        templates.get("\n{% endfor %}")
