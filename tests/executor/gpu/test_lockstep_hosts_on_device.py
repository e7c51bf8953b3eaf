"""Two hosts share the experts of a mixture, and one device: both are on the loopback interface, and
NCCL takes them for two, as each has an id of its own. Through `ringcast serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, command, serve, until
from test_lockstep import make_served_mixture

pytestmark = pytest.mark.gpu
LONG = 240.0  # seconds that both may take to start
PROMPTS = [f"prompt {i}" for i in range(4)]
NUM_TOKENS = 150
ENGINE = (
    *("--device", "cuda", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"),
    *("--gpu-memory-utilization", "0.2"),
)


class Streams:
    """Requests that are under way at once. begun: those that have said something. The first asks
    for logprobs, so one host samples outside of graphs.
    """

    def __init__(self, server: Server) -> None:
        self.begun: set[str] = set()
        self._said, self._errors = dict.fromkeys(PROMPTS, ""), []
        self._url = server.url + "/v1/completions"
        self._threads = [threading.Thread(target=self._ask, args=(p,)) for p in PROMPTS]
        for thread in self._threads:
            thread.start()

    def _ask(self, prompt: str) -> None:
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": NUM_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"logprobs": 1} if prompt == PROMPTS[0] else {}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=LONG) as answer:
                for line in answer:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        self._said[prompt] += json.loads(line[6:])["choices"][0]["text"]
                        self.begun.add(prompt)
        except (OSError, ValueError, KeyError) as error:
            self._errors.append(error)

    def texts(self) -> list[str]:
        for thread in self._threads:
            thread.join(LONG)
        assert not self._errors, self._errors
        return list(self._said.values())


@contextlib.contextmanager
def node(model: Path, options: tuple[str, ...], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    more = ("--headless", "--data-parallel-start-rank", "1")
    environment = os.environ | {"NCCL_HOSTID": "node"}
    with log.open("a") as file:
        words = command(model, *options, *more)
        process = subprocess.Popen(words, stderr=file, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()


def free_ports(count: int) -> int:
    """The first of so many."""
    for first in range(20_000, 32_000, 50):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no ports are free")


def test_the_texts_of_one_and_a_node_that_is_killed_comes_back(tmp_path):
    model, log = make_served_mixture(tmp_path / "mixture"), tmp_path / "node"
    name = ("--served-model-name", "m")
    with serve(model, *ENGINE, *name) as alone:
        want = Streams(alone).texts()
    assert len(set(want)) == len(PROMPTS)

    def check(got: list[str]) -> None:
        same = sum(a == b for a, b in zip(got, want, strict=True))
        assert same >= len(want) - 1, (got, want)  # one may part at a tie

    port = str(free_ports(4))
    where = ("--data-parallel-rpc-port", port, "--data-parallel-size-local", "1")
    options = (*ENGINE, "-dp", "2", "--enable-expert-parallel", *where)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(node(model, options, log))
        server = stack.enter_context(serve(model, *options, *name, NCCL_HOSTID="master"))
        check(Streams(server).texts())
        streams = Streams(server)
        until(lambda: len(streams.begun) == len(PROMPTS), LONG)
        first.kill()  # the master's device waits for it within a step
        first.wait()
        stack.enter_context(node(model, options, log))
        check(streams.texts())
        check(Streams(server).texts())
        assert "has closed the connection" in server.said
    assert "Traceback" not in log.read_text()
