"""Tool calls and reasoning through a real server: the model repeats what it is told, calls too."""

from __future__ import annotations

import os
import signal
from typing import Any

import openai
import pytest
from serving import serve
from tiny_model import make_tiny_model

SCHEMA = {"properties": {"at": {"type": "string"}, "n": {"type": "array"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
CALL = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "the <b> 🦊", "n": [1, {}]}}\n</tool_call>'
)
XML_CALL = (
    "<tool_call>\n<function=look>\n<parameter=at>\nthe <b> 🦊\n</parameter>\n"
    "<parameter=n>\n[1, {}]\n</parameter>\n</function>\n</tool_call>"
)
ARGUMENTS = '{"at": "the <b> 🦊", "n": [1, {}]}'
# The prompt is the last message, after which the reasoning begins; the model repeats all of it.
TEMPLATE = "{% if tools %}{{ messages[-1].content }}{% endif %}<think>"
OPTIONS = ("--device", "fake", "--load-format", "dummy", "--chat-template", TEMPLATE)
PARSERS = ("--enable-auto-tool-choice", "--reasoning-parser", "qwen3", "--tool-call-parser")
ECHO = {"RINGCAST_FAKE_ECHO": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def ask(server: Any, call: str, **fields: Any) -> Any:
    text = f"Hm.</think>Now.{call}"
    size = len(text.encode())  # the tiny model's tokens are bytes
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as api:
        answer = api.chat.completions.create(
            model=server.get("/v1/models")["data"][0]["id"],
            messages=[{"role": "user", "content": text}],
            max_tokens=size,
            **fields,
        )
        return list(answer) if fields.get("stream") else answer


def put_together(chunks: list[Any]) -> tuple[str, str, list[list[str]], str]:
    content = reasoning = ""
    calls: list[list[str]] = []
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning", "")
        for part in delta.tool_calls or []:
            if part.id is not None:
                calls.append([part.id, part.function.name, ""])
            calls[part.index][2] += part.function.arguments
    return reasoning, content, calls, chunks[-1].choices[0].finish_reason


@pytest.mark.parametrize(("parser", "text"), [("hermes", CALL), ("qwen3_coder", XML_CALL)])
def test_stream_and_not(model: Any, parser: str, text: str) -> None:
    with serve(model, *OPTIONS, *PARSERS, parser, **ECHO) as server:
        choice = ask(server, text, tools=TOOLS).choices[0]
        reasoning, content, calls, reason = put_together(
            ask(server, text, tools=TOOLS, stream=True)
        )
        (call,) = choice.message.tool_calls
        said = (choice.message.reasoning, choice.message.content, choice.finish_reason)
        assert said == (reasoning, content, reason) == ("Hm.", "Now.", "tool_calls")
        assert (call.function.name, call.function.arguments) == ("look", ARGUMENTS)
        assert [each[1:] for each in calls] == [["look", ARGUMENTS]]
        assert calls[0][0] != call.id
        as_text = ask(server, text, tools=TOOLS, tool_choice="none").choices[0]
        assert (as_text.message.content, as_text.finish_reason) == (f"Now.{text}", "length")


def test_a_takeover_within_a_call(model: Any) -> None:
    slow = {"RINGCAST_FAKE_STEP_SECONDS": "0.01"}
    with serve(model, *OPTIONS, *PARSERS, "hermes", **ECHO, **slow) as server:
        pid = server.pids()["detokenizer.0"]
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as api:
            stream = api.chat.completions.create(
                model=server.get("/v1/models")["data"][0]["id"],
                messages=[{"role": "user", "content": f"Hm.</think>{CALL}{CALL}"}],
                max_tokens=len(f"Hm.</think>{CALL}{CALL}".encode()),
                tools=TOOLS,
                stream=True,
            )
            chunks = []
            for chunk in stream:
                chunks.append(chunk)
                if chunk.choices[0].delta.tool_calls and pid:
                    os.kill(pid, signal.SIGKILL)
                    pid = 0
        reasoning, content, calls, reason = put_together(chunks)
        assert pid == 0
        assert (reasoning, content, reason) == ("Hm.", "", "tool_calls")
        assert [call[1:] for call in calls] == [["look", ARGUMENTS]] * 2
        assert server.statistics()["client.0.takeovers"] == 1
