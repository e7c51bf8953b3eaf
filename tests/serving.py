"""A real `ringcast serve` for tests: start it, find its address and its processes, end it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

RINGCAST = str(Path(sys.executable).parent / "ringcast")
# Where it isn't installed, but found.
AS_MODULE = [sys.executable, "-P", "-m", "ringcast.frontend.cli.main"]


class Server:
    """A running server. said: what it has written to stderr since the ready line."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.said = ""
        self._listening = threading.Thread(target=self._listen)
        self._listening.start()

    def _listen(self) -> None:
        for line in self.process.stderr:
            self.said += line

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict | bytes, timeout: float = 60) -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def stream(self, path: str, body: dict) -> Iterator[str]:
        """The data of each server-sent event."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps({**body, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()

    def actors(self) -> dict[str, dict]:
        return {actor["name"]: actor for actor in self.get("/status")["actors"]}

    def pids(self) -> dict[str, int]:
        return {name: actor["pid"] for name, actor in self.actors().items()}

    def all_ready(self) -> bool:
        """Whether all actors are ready; False also while nobody answers."""
        try:
            return all(actor["state"] == "ready" for actor in self.actors().values())
        except OSError:
            return False

    def statistics(self) -> dict[str, float]:
        return self.get("/status")["statistics"]

    def end(self, number: int = signal.SIGINT, timeout: float = 20) -> tuple[int, str]:
        """Send a signal; the exit status and what was said on stderr since the ready line."""
        self.process.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout: float = 20) -> tuple[int, str]:
        status = self.process.wait(timeout)
        self._listening.join(timeout)
        return status, self.said


def command(model: Path | str, *options: str) -> list[str]:
    program = [RINGCAST] if Path(RINGCAST).exists() else AS_MODULE
    return [*program, "serve", str(model), "--port", "0", *options]


@contextlib.contextmanager
def serve(model: Path | str, *options: str, **env: str) -> Iterator[Server]:
    process = subprocess.Popen(
        command(model, *options), stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
    )
    said, server = [], None
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"ready in .* at (http://\S+)/v1", line):
                server = Server(process, found[1])
                yield server
                break
        else:
            raise AssertionError(f"exit {process.wait()} before it was ready: {''.join(said)}")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if server is not None:
            server.wait()
        process.stderr.close()


def until(condition, seconds: float = 10.0):
    """Wait for something another process does; its last value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return value


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
