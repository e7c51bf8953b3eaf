"""One engine over two hosts, each in namespaces of its own: a master with the API server, and a
headless node. Real processes on the processor, and a model whose weights are drawn.

What requests give is known from one process that has the whole model.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
import urllib.request

import pytest
import torch
from in_process import tiny_engine
from namespaces import Host, Program, cable, lacking
from random_models import RandomWeights
from safetensors.torch import save_file
from serving import RINGCAST, until
from tiny_model import make_tiny_model

from ringcast import SamplingParams
from ringcast.executor.cpu_decoder import CpuDecoder
from ringcast.executor.layers import Layout
from ringcast.executor.models import find_model

pytestmark = pytest.mark.slow
REASON = lacking()
MASTER_IP, NODE_IP = "10.77.4.1", "10.77.4.2"
PORT = 13501
NUM_TOKENS = 60
PROMPTS = [[5 + (i * number) % 90 for i in range(10 + 9 * number)] for number in range(8)]
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = {"deterministic": True, "max_num_batched_tokens": 48, "max_model_len": 256}
SIZES = {"tensor": ("-tp", "2"), "pipeline": ("-pp", "2"), "both": ("-tp", "2", "-pp", "2")}


def make_model(folder):
    make_tiny_model(folder)
    weights, config = RandomWeights(), json.loads((folder / "config.json").read_text())
    declared = find_model(config["architectures"][0]).check(config)
    CpuDecoder(declared, Layout(torch.float32), 4, weights, lambda *_: None)
    save_file(weights.tensors, folder / "model.safetensors")
    return folder


class Cluster:
    def __init__(self, folder, master: Host, node: Host, line: str, url: str) -> None:
        self.folder, self.master_host, self.node_host, self.url = folder, master, node, url
        self._line = line
        self.model = make_model(folder / "model")
        self.secret = self.write_secret("secret")

    def write_secret(self, name: str) -> str:
        path = self.folder / name
        path.write_text(secrets.token_hex(32))
        path.chmod(0o600)
        return str(path)

    def start_master(self, *sizes: str) -> Program:
        more = ("--host", "0.0.0.0", "--served-model-name", "model", "--node-rank", "0")
        return self._start(self.master_host, *more, *sizes)

    def start_node(self, *more: str) -> Program:
        return self._start(self.node_host, "--headless", "--node-rank", "1", *more)

    def _start(self, host: Host, *more: str) -> Program:
        return host.start(
            *(RINGCAST, "serve", str(self.model), "--device", "cpu", "--dtype", "float32"),
            *("--deterministic", "--max-num-batched-tokens", "48", "--max-model-len", "256"),
            *("--block-size", "4", "--num-gpu-blocks-override", "200", "--num-threads", "1"),
            *("--nnodes", "2", "--master-addr", MASTER_IP, "--master-port", str(PORT)),
            *("--cluster-secret-file", self.secret, *more),
        )

    def cut(self) -> None:
        self.master_host.do("ip", "link", "set", self._line, "down")

    def mend(self) -> None:
        self.master_host.do("ip", "link", "set", self._line, "up")

    def status(self) -> dict:
        with urllib.request.urlopen(self.url + "/status", timeout=30) as answer:
            return json.load(answer)


class Load:
    """All prompts at once, as streams. begun: the first one has got some tokens."""

    def __init__(self, url: str) -> None:
        self.begun = threading.Event()
        self._url = url
        self._results, self._errors = {}, []
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(len(PROMPTS))]
        for thread in self._threads:
            thread.start()

    def _ask(self, i: int) -> None:
        body = {"model": "model", "prompt": PROMPTS[i], "max_tokens": NUM_TOKENS, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True, "logprobs": 0}
        body |= {"return_tokens_as_token_ids": True}
        request = urllib.request.Request(
            self._url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        tokens = []
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        tokens += choice["logprobs"]["tokens"] if choice["logprobs"] else []
                        if len(tokens) > 10:
                            self.begun.set()
            self._results[i] = [int(token.removeprefix("token_id:")) for token in tokens]
        except (OSError, ValueError, KeyError) as error:
            self._errors.append(error)
            self.begun.set()

    def results(self) -> list[list[int]]:
        for thread in self._threads:
            thread.join(120)
        assert not self._errors, self._errors
        return [self._results[i] for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if REASON:
        pytest.skip(REASON)
    pid = os.getpid()
    outside = f"10.{100 + pid % 50}.{pid // 50 % 250}"
    with contextlib.ExitStack() as stack:
        master, node = (stack.enter_context(Host(name)) for name in ("master", "node-a"))
        stack.enter_context(cable(None, f"{outside}.1", master, f"{outside}.2"))
        line = stack.enter_context(cable(master, MASTER_IP, node, NODE_IP))
        folder = tmp_path_factory.mktemp("cluster")
        yield Cluster(folder, master, node, line, f"http://{outside}.2:8000")


@pytest.fixture(scope="module")
def want(cluster):
    """What one process gives that has all of the model."""
    tokens = tiny_engine(cluster.model, **OPTIONS, load_format="auto").generate(PROMPTS, PARAMS)
    assert len({*map(tuple, tokens)}) == len(PROMPTS)
    assert all(len({*each}) > 5 for each in tokens)
    return tokens


@pytest.mark.parametrize("sizes", SIZES)
def test_the_same_tokens_as_in_one_process(cluster, want, sizes):
    master, node = cluster.start_master(*SIZES[sizes]), cluster.start_node(*SIZES[sizes])
    master.until_said("ready in", seconds=200)
    node.until_said("node 1 ready in")
    assert Load(cluster.url).results() == want
    status = cluster.status()
    names = {actor["name"] for actor in status["actors"]}
    assert {"scheduler.0", "worker.0", "gateway.1"} <= names
    assert not {"worker.3" if sizes == "both" else "worker.1"} & names
    for way in ("out", "in"):  # what it says of itself comes now and then
        key = f"gateway.1.mirrored_{way}"
        until(lambda key=key: cluster.status()["statistics"][key] > 10_000)
    node.signal(signal.SIGTERM)
    assert node.wait() == 0
    master.until_said("node node-a has left: it is being shut down; waiting for node 1")
    master.signal(signal.SIGTERM)
    assert master.wait() == 0
    assert "Traceback" not in master.said + node.said


def test_who_is_another_is_refused_on_both_sides(cluster):
    master = cluster.start_master("-tp", "2")
    master.until_said("gateway.1: waiting for node 1")
    other_secret = ("--cluster-secret-file", cluster.write_secret("other"))
    stranger = cluster.start_node("-tp", "2", *other_secret, "--data-parallel-join-timeout", "3")
    assert stranger.wait() == 1
    assert f"no answer from {MASTER_IP}:{PORT} for 3 s" in stranger.said
    assert "that lets node 1 in: is the master up" in stranger.said
    master.until_said("tried to join as node 1 is refused: it hasn't shown this cluster's secret")
    other = cluster.start_node("-pp", "2")
    assert other.wait() == 2
    assert "tensor_parallel_size = 1 on the node and 2 on the master: must be alike" in other.said
    master.signal(signal.SIGTERM)
    assert master.wait() == 0


@pytest.mark.parametrize("sizes", ["tensor", "pipeline"])
def test_a_node_is_lost_and_comes_back(cluster, want, sizes):
    """By kill -9, and by its cable; and a worker, and the master. No token is lost."""
    master, node = cluster.start_master(*SIZES[sizes]), cluster.start_node(*SIZES[sizes])
    master.until_said("ready in", seconds=200)
    load = Load(cluster.url)
    assert load.begun.wait(60)
    node.kill()
    master.until_said("has closed the connection; waiting for node 1; restarting")
    node = cluster.start_node(*SIZES[sizes])
    assert load.results() == want
    master.until_said("back after")
    load = Load(cluster.url)
    assert load.begun.wait(60)
    cluster.cut()
    master.until_said("node node-a went silent")
    node.until_said(f"the master at {MASTER_IP}:{PORT} went silent")
    cluster.mend()
    assert load.results() == want
    node.until_said("joining again")
    load = Load(cluster.url)
    assert load.begun.wait(60)
    pids = {actor["name"]: actor["pid"] for actor in cluster.status()["actors"]}
    os.kill(_outer_pid(cluster.master_host, pids["worker.0"]), signal.SIGKILL)
    assert load.results() == want
    node.until_said("joining again", 2)
    master.kill()
    node.until_said("joining again", 3)
    master = cluster.start_master(*SIZES[sizes])
    master.until_said("ready in", seconds=200)
    assert Load(cluster.url).results() == want
    for program in (node, master):
        program.signal(signal.SIGTERM)
        assert program.wait() == 0


def _outer_pid(host: Host, inner: int) -> int:
    """The process id here of a process that has `inner` on that host."""
    space = os.readlink(f"/proc/{host.pid}/ns/pid")
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == space:
                with open(f"/proc/{name}/status") as status:
                    (line,) = (line for line in status if line.startswith("NSpid:"))
                if int(line.split()[-1]) == inner:
                    return int(name)
    raise AssertionError(f"no process {inner} on {host.name}")
