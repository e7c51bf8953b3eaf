"""A child process that is heard line by line, and never outlives its caller's patience."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path


class ChildFailedError(Exception):
    """The child ended with a status other than 0. The text is the last line it wrote to stderr."""


def run(
    command: Sequence[str],
    on_line: Callable[[str], None],
    *,
    work: Path,
    keep_open: Sequence[int] = (),
) -> None:
    """Run `command` to its end and hand each line of its stdout to `on_line`.

    work: its temporary files go here. keep_open: file descriptors that it inherits.
    Raises ChildFailedError; on any other exception (Ctrl-C above all) the child is killed first.
    """
    with (
        tempfile.TemporaryFile(dir=work) as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(work), "PYTHONUNBUFFERED": "1"},
            text=True,
            errors="replace",
            pass_fds=keep_open,
        ) as child,
    ):
        try:
            assert child.stdout is not None
            for line in child.stdout:
                on_line(line.rstrip("\n"))
            status = child.wait()
        except BaseException:
            child.kill()
            raise
        if status != 0:
            raise ChildFailedError(_last_line(errors.fileno()) or _how_it_ended(status))


def _last_line(fd: int) -> str:
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, encoding="utf-8", errors="replace", closefd=False) as file:
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1] if lines else ""


def _how_it_ended(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
