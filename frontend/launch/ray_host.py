"""The actor of Ray in which a replica runs, as a child process: `ringcast serve --headless`.

Ray calls `run`, which lasts as long as the child does, and `stop` beside it. When Ray kills the
actor, its node dies or the master does, the child's lifeline ends (host_process.py).
"""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Any

import msgspec

from ...actors.linux import memory_fd
from .host_process import HostBoot

CALLS_AT_ONCE = 2  # of Ray: run, and stop
_LAST_LINES = 30


class RayHost:
    """One replica's host. Ray makes it anew on another node if this one is lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def run(
        self, options: dict[str, Any], secret: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        """Start the child and wait for its end. Returns its exit status and its last lines."""
        boot_fd = memory_fd(msgspec.msgpack.encode(HostBoot(options=options, secret=secret)))
        try:
            with self._lock:
                if self._stopped:
                    return 0, ""
                process = self._process = _start(boot_fd, variables)
        finally:
            os.close(boot_fd)
        assert process.stderr is not None
        assert process.stdin is not None
        with process.stdin, process.stderr:
            said = _pass_on(process.stderr)
            status = process.wait()
        return status, said

    def stop(self, seconds: float) -> None:
        """End the child, in order if it does so in time. None is started any more."""
        with self._lock:
            self._stopped = True
            process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(boot_fd: int, variables: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "ringcast.frontend.launch.host_process", str(boot_fd)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        pass_fds=(boot_fd,),
        env={**os.environ, **variables},
        start_new_session=True,  # a terminal's Ctrl-C is the master's
    )


def _pass_on(lines: Iterable[str]) -> str:
    """Copy what the child says to the log of Ray's worker. Returns the last of it."""
    last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    for line in lines:
        sys.stderr.write(line)
        last.append(line)
    return "".join(last).rstrip()
