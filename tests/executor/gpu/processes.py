"""Processes that work together, run to their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

TO_SAY = 5  # seconds, for one that has waited in vain to say where


def run_together(
    script: str,
    arguments: Sequence[Sequence[str]],
    timeout: float,
    files: Sequence[int],
    closing: Sequence[int] = (),
    environments: Sequence[dict[str, str]] | None = None,
) -> list[bytes]:
    """What each has printed: `python -P script *arguments[i]`, which inherits the descriptors
    `files` and `closing`, and environments[i]. All descriptors are closed here: `closing` once all
    have begun, `files` at the end.

    Raises AssertionError with what has been said by those that fail or, after `timeout` seconds,
    wait: these say where.
    """
    own = environments or [{}] * len(arguments)
    shared = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONFAULTHANDLER": "1",
    }
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    how["pass_fds"] = [*files, *closing]
    processes = []
    try:
        for words, environment in zip(arguments, own, strict=True):
            command = [sys.executable, "-P", script, *words]
            processes.append(subprocess.Popen(command, env=shared | environment, **how))
        for file in closing:
            os.close(file)
        closing = ()
        deadline = time.monotonic() + timeout
        outputs = [_output_by(process, deadline) for process in processes]
    finally:
        for file in (*files, *closing):
            os.close(file)
        for process in processes:
            process.kill()
            process.communicate()
    errors = [
        f"process {number} ended with {process.returncode}:\n{said.decode()[-6000:]}"
        for number, (process, (_, said)) in enumerate(zip(processes, outputs, strict=True))
        if process.returncode
    ]
    assert not errors, "\n".join(errors)
    return [printed for printed, _ in outputs]


def _output_by(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    process.send_signal(signal.SIGABRT)  # prints where its threads are
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=TO_SAY)
    process.kill()
    return process.communicate()
