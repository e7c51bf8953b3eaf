"""A batch's output: nothing twice, nothing torn, nobody else's file harmed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ringcast.frontend.batch import output_file
from ringcast.frontend.batch.lines import BatchResponse, Outcome, response_line
from ringcast.frontend.batch.output_file import OutputFile
from ringcast.mq.errors import ConfigError, RingcastError


def answer(custom_id: str, status: int = 200) -> bytes:
    return response_line(custom_id, BatchResponse(status, "r", msgspec.Raw(b"{}")))


def settle_all(outcome: Outcome) -> bool:
    return True


def resume(
    path: Path, *lines: bytes, settle: Callable[[Outcome], bool] = settle_all
) -> list[str | None]:
    """Open, read what is there, append lines."""
    with OutputFile(str(path), False) as output:
        found = [outcome.custom_id for outcome in output.resume(settle)]
        for line in lines:
            output.write(line)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_lines_are_appended_and_read_again(path: Path) -> None:
    a, b, c = answer("a"), answer("b", 400), answer("c")
    assert resume(path, a) == []
    assert resume(path, b, c) == ["a"]
    assert resume(path) == ["a", "b", "c"]
    assert path.read_bytes() == a + b + c


def test_a_line_is_there_at_once(path: Path) -> None:
    with OutputFile(str(path), False) as output:
        list(output.resume(settle_all))
        output.write(answer("a"))
        assert path.read_bytes().count(b"\n") == 1


def test_a_torn_last_line_is_cut_off_wherever_it_was_torn(path: Path) -> None:
    a, b = answer("a"), answer("b")
    for length in range(1, len(b)):
        path.write_bytes(a + b[:length])
        assert resume(path, answer("c")) == ["a"]
        assert resume(path) == ["a", "c"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a file of somebody's", "its last line is no output"),
        (b"\n", "line 1 is no output of a batch"),
        (answer("a") + b"{}\n" + answer("b"), "line 2 is no output of a batch"),
        (answer("a") + answer("z") + answer("b")[:9], "line 2 has custom_id 'z', which the input"),
    ],
)
def test_another_file_stays_as_it_is(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        resume(path, settle=lambda outcome: outcome.custom_id != "z")
    assert "--overwrite" in str(caught.value)
    assert path.read_bytes() == content


def test_overwrite(path: Path) -> None:
    path.write_bytes(b"anything")
    with OutputFile(str(path), True) as output:
        assert list(output.resume(settle_all)) == []
        output.write(answer("a"))
    assert resume(path) == ["a"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_one_run_at_a_time(path: Path, overwrite: bool) -> None:
    with OutputFile(str(path), False) as output:
        list(output.resume(settle_all))
        output.write(answer("a"))
        with pytest.raises(ConfigError, match="being written by another run"):
            OutputFile(str(path), overwrite)
    assert resume(path) == ["a"]


def test_what_cant_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*: No such file"):
        OutputFile(str(tmp_path / "no" / "folder"), False)
    with pytest.raises(ConfigError, match="Is a directory"):
        OutputFile(str(tmp_path), False)


def test_after_a_failed_write_there_is_none() -> None:
    with OutputFile("/dev/full", False) as output:
        assert not output.resumable
        assert list(output.resume(settle_all)) == []
        with pytest.raises(RingcastError, match="cannot write /dev/full: No space left"):
            output.write(answer("a"))
        with pytest.raises(RingcastError, match="cannot write /dev/full any more"):
            output.write(b"")


def test_is_synced_now_and_then_and_at_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    synced: list[int] = []
    monkeypatch.setattr(output_file.time, "monotonic", lambda: now)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    a, b = answer("a"), answer("b")
    with OutputFile(str(path), False) as output:
        list(output.resume(settle_all))
        output.write(a)
        assert synced == []
        now += 6
        output.write(b)
        assert synced == [len(a + b)]
        output.write(a)
    assert synced == [len(a + b), len(a + b + a)]
