"""One engine on two hosts that are one: both are on the loopback interface, and need no secret.

With the fake device. test_nodes.py has namespaces, a model and a secret.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess

import pytest
from ports import free_ports
from serving import command, serve, until
from tiny_model import make_tiny_model

NUM_TOKENS = 40


@pytest.fixture
def model(tmp_path):
    return make_tiny_model(tmp_path / "model")


@pytest.fixture
def options():
    engine = ("--device", "fake", "--load-format", "dummy", "--num-gpu-blocks-override", "64")
    return (*engine, "-tp", "2", "--nnodes", "2", "--master-port", str(free_ports()))


@contextlib.contextmanager
def node(model, options, log):
    more = ("--headless", "--node-rank", "1")
    with log.open("a") as file:
        process = subprocess.Popen(command(model, *options, *more), stderr=file)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def read(server, on_event=lambda count: None):
    body = {"model": "m", "prompt": "abc", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    texts = []
    for event in server.stream("/v1/completions", body | {"seed": 1}):
        if event != "[DONE]":
            texts.append(json.loads(event)["choices"][0]["text"])
            on_event(len(texts))
    return "".join(texts)


def test_a_node_dies_under_a_stream_and_comes_back(model, options, tmp_path):
    log = tmp_path / "node"
    more = ("--served-model-name", "m")
    slowly = {"RINGCAST_FAKE_STEP_SECONDS": "0.01"}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(node(model, options, log))
        server = stack.enter_context(serve(model, *options, *more, **slowly))
        want = read(server)
        names = set(server.pids())
        assert {"scheduler.0", "worker.0", "gateway.1"} <= names
        assert "worker.1" not in names

        def kill(count):
            if count == 10:
                first.kill()
                first.wait()
                stack.enter_context(node(model, options, log))

        assert read(server, kill) == want
        assert "has closed the connection; waiting for node 1; restarting" in server.said
        status, _ = server.end()
        assert status == 0
    said = log.read_text()
    assert said.count("node 1 has joined the master at 127.0.0.1") == 2
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_node_leaves_in_order_and_a_stranger_is_refused(model, options, tmp_path):
    log, more = tmp_path / "node", ("--served-model-name", "m")
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(node(model, (*options, "-pp", "2"), tmp_path / "other"))
        first = stack.enter_context(node(model, options, log))
        server = stack.enter_context(serve(model, *options, *more))
        assert other.wait(20) == 2
        refusal = "pipeline_parallel_size = 2 on the node and 1 on the master: must be alike"
        assert refusal in (tmp_path / "other").read_text()
        until(lambda: "node 1 ready in" in log.read_text())  # before, it has nothing to leave
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        status, said = server.end()
        assert status == 0
    assert "has left: it is being shut down; waiting for node 1" in said
