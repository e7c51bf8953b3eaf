"""A batch's input: what is left to do of it, whatever earlier runs have done."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from ringcast.frontend.batch.input_file import InputFile
from ringcast.frontend.batch.lines import Outcome
from ringcast.mq.errors import ConfigError


def ask(custom_id: str) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST"})


LINES = [ask("a"), "", ask("b"), "no JSON", "  ", ask("a"), ask("c")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(LINES))
    return path


def left(path: Path, *outcomes: Outcome) -> list[tuple[int, bool]]:
    with InputFile(str(path)) as source:
        source.survey(lambda _: None)
        assert source.num_lines == 5
        for outcome in outcomes:
            assert source.settle(outcome)
        lines = list(source.unsettled())
        assert source.num_settled == 5 - len(lines)
    assert [line.text.decode().rstrip("\n") for line in lines] == [
        LINES[line.number - 1] for line in lines
    ]
    return [(line.number, line.duplicate) for line in lines]


def test_blank_lines_are_none_and_duplicates_are_told(path: Path) -> None:
    assert left(path) == [(1, False), (3, False), (4, False), (6, True), (7, False)]


def test_what_is_done_is_not_done_again(path: Path) -> None:
    a, c = Outcome("a", 200, 0), Outcome("c", 400, 0)
    assert left(path, a, c, c) == [(3, False), (4, False), (6, True)]
    assert left(path, a, c, Outcome(None, 0, 4), Outcome(None, 0, 6)) == [(3, False)]
    assert left(path, a, c, Outcome(None, 0, 4), Outcome(None, 0, 6), Outcome("b", 0, 3)) == []


def test_a_line_that_was_mended_is_done(path: Path) -> None:
    everything = left(path)
    assert left(path, Outcome(None, 0, 7), Outcome(None, 0, 0), Outcome(None, 0, 99)) == everything


def test_an_outcome_of_another_input(path: Path) -> None:
    with InputFile(str(path)) as source:
        source.survey(lambda _: None)
        assert not source.settle(Outcome("z", 200, 0))


def test_what_is_appended_meanwhile_is_for_the_next_run(path: Path) -> None:
    with InputFile(str(path)) as source:
        source.survey(lambda _: None)
        with path.open("a") as file:
            file.write("\n" + ask("d") + "\n")
        assert [line.number for line in source.unsettled()] == [1, 3, 4, 6, 7]


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("\n".join(LINES),))
    writer.start()
    assert left(pipe) == [(1, False), (3, False), (4, False), (6, True), (7, False)]
    writer.join()


def test_reports_how_far_it_is(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text((ask("a") + "\n") * 25_000)
    reports: list[int] = []
    with InputFile(str(path)) as source:
        source.survey(reports.append)
        assert source.size == path.stat().st_size
    assert reports == [source.size * 10 // 25, source.size * 20 // 25]


@pytest.mark.parametrize("text", ["", "\n\n", "no JSON\n{}\n"])
def test_a_file_without_requests(tmp_path: Path, text: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with InputFile(str(path)) as source, pytest.raises(ConfigError, match=r"no line that is a req"):
        source.survey(lambda _: None)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere: No such file"):
        InputFile(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="Is a directory"):
        InputFile(str(tmp_path))
