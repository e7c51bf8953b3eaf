"""Three hosts whose replicas step together, as processes beside each other: one has two ranks, and
one is lost before the master serves, and one after."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal

import pytest
from load import Load
from namespaces import Program
from ports import free_ports
from serving import RINGCAST
from tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
LONG = 200.0  # seconds that all of them together may take to start
PROMPTS = [f"prompt {i}" for i in range(8)]


class Hosts:
    """master has rank 0, "a" ranks 1 and 2, "b" rank 3."""

    def __init__(self, folder) -> None:
        self._model = str(make_tiny_model(folder))
        self._port = free_ports(8)  # of each rank and its mirror
        self._programs: list[Program] = []
        self.master = self._start("--port", "0", "--data-parallel-size-local", "1")

    def start(self, name: str) -> Program:
        first, num = {"a": (1, 2), "b": (3, 1)}[name]
        ranks = ("--data-parallel-start-rank", str(first), "--data-parallel-size-local", str(num))
        return self._start("--headless", *ranks)

    def _start(self, *own: str) -> Program:
        command = (
            *(RINGCAST, "serve", self._model, "--device", "fake", "--load-format", "dummy"),
            *("--data-parallel-size", "4", "--enable-expert-parallel"),
            *("--served-model-name", "model", "--num-gpu-blocks-override", "256"),
            *("--data-parallel-rpc-port", str(self._port), *own),
        )
        # A Program passes signals on to its children.
        program = Program(["sh", "-c", f"{shlex.join(command)}; exit $?"], {})
        self._programs.append(program)
        return program

    def load(self) -> Load:
        url = re.search(r"at (http://\S+)/v1", self.master.said)[1]
        return Load(url, PROMPTS, seconds=2 * LONG, max_tokens=300)

    def end(self) -> None:
        for program in self._programs:
            with contextlib.suppress(OSError):
                program.signal(signal.SIGTERM)
        for program in self._programs:
            program.wait(LONG)


@pytest.fixture
def hosts(tmp_path):
    hosts = Hosts(tmp_path / "model")
    try:
        yield hosts
    finally:
        hosts.end()


def test_all_wait_for_all_before_and_after(hosts):
    master = hosts.master
    master.until_said("headless host with rank 1, 2, 3", seconds=LONG)
    a = hosts.start("a")
    master.until_said("headless host with rank 3", seconds=LONG)
    a.kill()
    master.until_said("all replicas wait for a node; restarting", seconds=LONG)
    a, b = hosts.start("a"), hosts.start("b")
    master.until_said("ready in", seconds=LONG)
    want = hosts.load().texts()
    assert all(want)
    requests = hosts.load()
    b.kill()
    a.until_said("joining again", seconds=LONG)
    hosts.start("b")
    assert requests.texts() == want
    a.until_said("rank 2 serves the master", 2, seconds=LONG)
    assert hosts.load().texts() == want
