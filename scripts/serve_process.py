"""A `ringcast serve` for the programs here that talk to one: its start, and its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

READY_SECONDS = 120.0
END_SECONDS = 60.0


class ServeProcess:
    """A running server. url: without a path. log: the file that has what it says."""

    def __init__(self, options: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        """Raises SystemExit if it doesn't become ready."""
        self.log = log
        self._interrupted = False
        command = [sys.executable, "-P", "-m", "ringcast.frontend.cli.main", "serve"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, *options, "--port", "0"],
                stderr=file,
                env={**os.environ, **variables},
            )
        deadline = time.monotonic() + READY_SECONDS
        while (found := re.search(r"ready in .* at (\S+)/v1", log.read_text())) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                self.process.wait()
                raise SystemExit(f"the server is not ready:\n{log.read_text()}")
            time.sleep(0.05)
        self.url = found[1]

    def interrupt(self) -> None:
        """Once: a second Ctrl-C would end it in the middle."""
        if self.process.poll() is None and not self._interrupted:
            self.process.send_signal(signal.SIGINT)
        self._interrupted = True

    def end(self) -> list[str]:
        """Interrupt it and wait. Returns what is wrong with how it ended and what it said."""
        self.interrupt()
        wrong = []
        try:
            status = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if status != 0:
            wrong.append(f"{self.log.name}: exit status {status}")
        text = self.log.read_text(errors="replace")
        if "Traceback" in text:
            traceback = text[text.index("Traceback") :][:3000]
            wrong.append(f"{self.log.name} has a traceback:\n{traceback}")
        return wrong
