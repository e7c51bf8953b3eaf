"""`ringcast batch` as a whole: files in and out, whatever ends it in between."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from serving import gone, until
from tiny_model import make_tiny_model

from ringcast.frontend.batch.endpoints import ENDPOINTS
from ringcast.frontend.cli.main import main
from ringcast.mq.errors import ConfigError, EngineDeadError

TEXT = "Hello, wörld 🌍!"


def ask(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": "hi", **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, *lines: dict[str, Any] | str) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def statuses(path: Path) -> dict[str | None, int | None]:
    return {
        line["custom_id"]: line["response"] and line["response"]["status_code"]
        for line in read(path)
    }


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_a_batch(connection: Any, files: Any, capsys: Any) -> None:
    source, output = files
    chat = ask("chat") | {"url": "/v1/chat/completions"}
    chat["body"] = {"messages": [{"role": "user", "content": "hi"}], "model": "gpt"}
    write(source, ask("a"), chat, "{", ask("bad", temperature=-1), ask("s", stream=True), ask("a"))
    options = ["some-model", "--served-model-name", "gpt", "--max-num-seqs", "3"]
    assert main(["batch", str(source), str(output), *options]) == 0
    assert connection.launched[0].model == "some-model"
    assert connection.num_closed == 1
    assert statuses(output) == {"a": 200, "chat": 200, "bad": 400, "s": None, None: None}
    errors = {line["error"]["line"]: line["error"] for line in read(output) if line["error"]}
    assert {number: error["code"] for number, error in errors.items()} == {
        3: "invalid_json_line",
        5: "invalid_stream",
        6: "duplicate_custom_id",
    }
    (a,) = [line for line in read(output) if line["custom_id"] == "a"]
    assert a["error"] is None
    assert a["response"]["body"]["choices"][0]["text"] == TEXT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 answered, 4 failed; 14 prompt and 10 output tokens in " in captured.err


@pytest.mark.parametrize(
    "words",
    [
        ["-i", "IN", "-o", "OUT", "some-model"],
        ["-o", "OUT", "IN", "some-model"],
        ["some-model", "--input-file", "IN", "--output-file", "OUT"],
        ["-i", "IN", "OUT", "--model", "some-model"],
    ],
)
def test_files_by_vllms_names(connection: Any, files: Any, words: list[str]) -> None:
    source, output = files
    write(source, ask("a"))
    named = {"IN": str(source), "OUT": str(output)}
    assert main(["batch", *(named.get(word, word) for word in words)]) == 0
    assert connection.launched[0].model == "some-model"
    assert statuses(output) == {"a": 200}


def test_every_endpoint_is_asked_and_an_error_costs_its_line_alone(
    connection: Any, files: Any, capsys: Any
) -> None:
    source, output = files
    write(source, *(ask(url) | {"url": url} for url in ENDPOINTS), ask("no") | {"url": "/v1/no"})
    assert main(["batch", str(source), str(output)]) == 0
    good = {"/v1/completions": 200}  # all others miss something, and this model makes no vectors
    assert statuses(output) == dict.fromkeys(ENDPOINTS, 400) | good | {"no": None}
    assert f"1 answered, {len(ENDPOINTS)} failed; 7 prompt" in capsys.readouterr().err


def test_the_second_run_has_nothing_to_do(connection: Any, files: Any, capsys: Any) -> None:
    source, output = files
    write(source, ask("a"), "no JSON", ask("b"))
    command = ["batch", str(source), str(output)]
    assert main(command) == 0
    before = output.read_bytes()
    capsys.readouterr()
    assert main(command) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert output.read_bytes() == before
    assert len(connection.launched) == 1

    assert main([*command, "--overwrite"]) == 0
    assert len(read(output)) == 3
    assert {line["id"] for line in read(output)}.isdisjoint(
        json.loads(line)["id"] for line in before.splitlines()
    )


def test_a_longer_input_and_a_torn_line(connection: Any, engine: Any, files: Any) -> None:
    source, output = files
    write(source, ask("a"), ask("b"))
    command = ["batch", str(source), str(output)]
    assert main(command) == 0
    write(source, ask("a"), ask("b"), ask("c"))
    output.write_bytes(output.read_bytes()[:-7])
    engine.sent.clear()
    assert main(command) == 0
    assert sorted(line["custom_id"] for line in read(output)) == ["a", "b", "c"]
    assert len(engine.generated) == 2


def test_exit_status_1_if_nothing_could_be_answered(connection: Any, files: Any) -> None:
    source, output = files
    write(source, ask("a", n=0), "no JSON")
    command = ["batch", str(source), str(output)]
    assert main(command) == 1
    assert main(command) == 1
    assert statuses(output) == {"a": 400, None: None}


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        ([ask("a")], ["model", "-i", "other"], "'model' is one word too many"),
        (["no JSON"], [], "has no line that is a request"),
        ([ask("a")], ["--block-size", "0"], "block_size = 0"),
        ([ask("a")], ["--max-in-flight", "0"], "max_in_flight = 0: must be at least 1"),
        ([ask("a")], ["--url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype says how"),
        ([ask("a")], ["--url", "http://127.0.0.1:9", "model"], "--model says how"),
        ([ask("a")], ["--url", "http://127.0.0.1:9"], "no server answers there"),
    ],
)
def test_mistakes_are_said_before_anything_starts(
    connection: Any, files: Any, capsys: Any, lines: Any, options: list[str], words: str
) -> None:
    source, output = files
    write(source, *lines)
    assert main(["batch", str(source), str(output), *options]) == 2
    assert words in capsys.readouterr().err
    assert connection.launched == []


@pytest.mark.parametrize(
    ("words", "missing"), [([], "input"), (["-i", "x"], "output"), (["-o", "x"], "input")]
)
def test_files_are_needed(words: list[str], missing: str, capsys: Any) -> None:
    assert main(["batch", *words]) == 2
    assert f"no {missing} file: say `ringcast batch IN OUT [MODEL]`" in capsys.readouterr().err


def test_files_that_dont_belong_together(connection: Any, files: Any, capsys: Any) -> None:
    source, output = files
    write(source, ask("a"))
    assert main(["batch", str(source), str(source)]) == 2
    assert "is the input" in capsys.readouterr().err
    assert main(["batch", str(source), str(output)]) == 0
    write(source, ask("b"))
    before = output.read_bytes()
    assert main(["batch", str(source), str(output)]) == 2
    assert "line 1 has custom_id 'a', which the input hasn't" in capsys.readouterr().err
    assert output.read_bytes() == before


def test_a_server_by_url(url: str, files: Any, engine: Any, capsys: Any) -> None:
    source, output = files
    write(source, *(ask(str(number)) for number in range(20)), ask("bad", model="other"))
    assert main(["batch", str(source), str(output), "--url", url, "--max-in-flight", "3"]) == 0
    assert statuses(output) == {str(number): 200 for number in range(20)} | {"bad": 404}
    assert "20 answered, 1 failed; 140 prompt and 100 output tokens" in capsys.readouterr().err


def test_standard_input_and_output(
    connection: Any, files: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = files
    write(source, ask("a"), ask("b"))
    with source.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["batch", "-", "-"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in lines) == ["a", "b"]


def test_an_engine_that_dies_or_doesnt_start(
    connection: Any, engine: Any, files: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = files
    write(source, ask("a"), ask("b"))
    connection.refusal = ConfigError("no such dtype")
    assert main(["batch", str(source), str(output)]) == 2
    assert "no such dtype" in capsys.readouterr().err
    connection.refusal = None

    def dying(to: str, message: Any) -> None:
        if len(engine.generated) == 1:
            error = EngineDeadError("worker.0 died")
            asyncio.get_running_loop().call_soon(engine.die, error)
        else:
            engine.send(to, message)

    monkeypatch.setattr(connection, "send", dying)
    assert main(["batch", str(source), str(output), "--max-in-flight", "1"]) == 1
    said = capsys.readouterr().err
    assert "1 answered, 0 failed" in said
    assert "ringcast: worker.0 died" in said
    assert statuses(output) == {"a": 200}


def test_ctrl_c_keeps_what_is_finished_and_the_next_run_goes_on(
    connection: Any, engine: Any, files: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = files
    write(source, *(ask(str(number)) for number in range(6)))

    def interrupting(to: str, message: Any) -> None:
        if len(engine.generated) == 3:  # which are answered; the fourth never will be
            engine.hold = 0
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        engine.send(to, message)

    command = ["batch", str(source), str(output), "--max-in-flight", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(connection, "send", interrupting)
        assert main(command) == 130
    said = capsys.readouterr().err
    assert "3 answered, 0 failed" in said
    assert "stopped; the same command" in said
    assert list(statuses(output)) == ["0", "1", "2"]
    assert len(engine.aborted) == 1

    engine.hold = None
    assert main(command) == 0
    assert list(statuses(output)) == [str(number) for number in range(6)]
    assert "3 answered, 0 failed (3 more in earlier runs)" in capsys.readouterr().err


def test_kill_9_in_the_middle_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [f"r{number}" for number in range(60)]
    write(source, *(ask(name, max_tokens=number % 7 + 1) for number, name in enumerate(names)))
    words = [str(source), str(output), str(model), "--device", "fake", "--load-format", "dummy"]
    words += ["--num-gpu-blocks-override", "64", "--max-num-seqs", "4"]
    command = [sys.executable, "-P", "-m", "ringcast.frontend.cli.main", "batch", *words]
    slow = {**os.environ, "RINGCAST_FAKE_STEP_SECONDS": "0.03"}

    with subprocess.Popen(command, env=slow, stderr=subprocess.DEVNULL) as process:
        until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 10, 30)
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
            supervisors = [int(pid) for pid in children.read().split()]
        process.kill()
    until(lambda: all(gone(pid) for pid in supervisors))
    finished = read(output)
    assert 10 <= len(finished) < len(names)
    with output.open("ab") as file:  # as a kill in the middle of a write would leave it
        file.write(output.read_bytes().splitlines()[0][:99])

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"({len(finished)} more in earlier runs)" in done.stderr
    lines = read(output)
    assert lines[: len(finished)] == finished
    assert sorted(line["custom_id"] for line in lines) == sorted(names)
    for line in lines:
        assert line["response"]["status_code"] == 200
        usage = line["response"]["body"]["usage"]
        assert usage["completion_tokens"] == int(line["custom_id"][1:]) % 7 + 1
