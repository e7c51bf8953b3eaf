"""`ringcast generate`: one prompt streams, several become a batch."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from ringcast.frontend.cli.main import main
from ringcast.mq.messages import ChatPrompt, ErrorInfo, TextPrompt

TEXT = "Hello, wörld 🌍!"


def test_one_prompt_streams(connection: Any, engine: Any, capsys: Any) -> None:
    assert main(["generate", "some-model", "--prompt", "hi", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == TEXT + "\n"
    (sent,) = engine.generated
    assert sent.prompt == TextPrompt("hi")
    assert sent.output.delta
    assert (sent.params.temperature, sent.params.max_tokens) == (0, 256)
    assert connection.launched[0].model == "some-model"


def test_lines_of_standard_input_are_prompts(
    connection: Any, engine: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert main(["generate", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out == "Hello\nHello\n"
    assert [sent.prompt for sent in engine.generated] == [TextPrompt("one"), TextPrompt("two")]


def test_json_has_everything(connection: Any, capsys: Any) -> None:
    arguments = ["--prompt", "a", "--n", "2", "--json", "--stop", "x", "--stop", "y"]
    assert main(["generate", *arguments, "--sampling-seed", "3"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["prompt"], result["num_prompt_tokens"]) == ("a", 7)
    assert [output["text"] for output in result["outputs"]] == [TEXT, TEXT]
    assert result["outputs"][0]["token_ids"] == [100, 101, 102, 103, 104]


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
def test_chat(connection: Any, engine: Any, capsys: Any, prompts: list[str]) -> None:
    options = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main(["generate", "--chat", *options]) == 0
    assert capsys.readouterr().out == f"{TEXT}\n" * len(prompts)
    assert all(isinstance(sent.prompt, ChatPrompt) for sent in engine.generated)
    assert b'"content":"a"' in engine.generated[0].prompt.messages


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "a", "--temperature", "-1"], "temperature must be"),
        (["--prompt", "a", "--n", "0"], "n must be"),
        (["--prompt", "a", "--block-size", "0"], "block_size = 0"),
        ([], "no prompt"),
    ],
)
def test_mistakes_are_said_before_anything_starts(
    connection: Any, capsys: Any, monkeypatch: Any, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["generate", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert connection.launched == []


def test_a_refused_prompt(connection: Any, engine: Any, capsys: Any) -> None:
    engine.reject = ErrorInfo("too long: 600 > 512")
    assert main(["generate", "--prompt", "a"]) == 2
    assert "ringcast: too long: 600 > 512" in capsys.readouterr().err
