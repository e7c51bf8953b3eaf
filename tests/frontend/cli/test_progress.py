"""Start-up progress: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from ringcast.frontend.cli.progress import StartProgress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(*, terminal: bool) -> tuple[StartProgress, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=terminal, width=100)
    return StartProgress(console, clock), out, clock


def test_plain_lines_when_nobody_watches() -> None:
    progress, out, clock = make(terminal=False)
    with progress:
        progress.on_model("download", 0, 0)
        progress.on_model("download", 10_000_000, 92_900_000)
        clock.now = 4.9
        progress.on_model("download", 20_000_000, 92_900_000)
        clock.now = 5.0
        progress.on_model("download", 30_000_000, 92_900_000)
        progress.on_model("convert", 0, 272)
        progress.update("worker.0", "load", 0, 10)
        clock.now = 10.0
        progress.on_model("convert", 100, 272)
    assert out.getvalue().splitlines() == [
        "download ...",
        "download 30.0 of 92.9 MB",
        "convert ...",
        "worker.0: load ...",
        "convert 100 of 272",
    ]


def test_unknown_amounts_and_markup() -> None:
    progress, out, clock = make(terminal=False)
    progress.update("[bold]", "[red]", 0, 0)
    clock.now = 6.0
    progress.update("[bold]", "[red]", 3, 0)
    assert out.getvalue().splitlines() == ["[bold]: [red] ...", "[bold]: [red] ..."]


def test_bars_on_a_terminal_go_away() -> None:
    progress, out, _ = make(terminal=True)
    with progress:
        progress.on_model("download", 0, 0)
        progress.on_model("download", 46_000_000, 92_000_000)
        progress.update("worker.0", "[load]", 1, 4)
        progress.update("worker.0", "[compile]", 1, 2)
    shown = out.getvalue()
    assert "46.0 of 92.0 MB" in shown
    assert "worker.0: [compile]" in shown
    assert shown.endswith("\x1b[2K")


def test_nothing_is_shown_before_there_is_something() -> None:
    progress, out, _ = make(terminal=True)
    with progress:
        assert out.getvalue() == ""
    assert out.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_silent_after_stop(terminal: bool) -> None:
    progress, out, _ = make(terminal=terminal)
    progress.update("worker.0", "load", 1, 4)
    progress.stop()
    shown = out.getvalue()
    progress.update("worker.0", "compile", 1, 4)
    progress.stop()
    assert out.getvalue() == shown


def test_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with StartProgress() as progress:
        progress.on_model("download", 0, 0)
    assert capsys.readouterr() == ("", "download ...\n")


def test_a_reader_who_is_gone_ends_nothing() -> None:
    program = (
        "from ringcast.frontend.cli.progress import StartProgress\n"
        "with StartProgress() as progress:\n"
        "    progress.on_model('download', 0, 0)\n"
        "    progress.on_model('weights', 0, 0)\n"
    )
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-P", "-c", program], stderr=write)
    os.close(write)
    assert ended.returncode == 0
