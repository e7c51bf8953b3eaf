"""Two hosts serve one endpoint: a master and a headless node, each in namespaces of its own.

Real processes with the fake device. What a request gives is known from the first, undisturbed run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
import urllib.error
import urllib.request

import pytest
from namespaces import Host, Program, cable, lacking
from serving import RINGCAST, until
from tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
REASON = lacking()
MASTER_IP, NODE_IP = "10.77.0.1", "10.77.0.2"
SLOW = {"RINGCAST_FAKE_STEP_SECONDS": "0.02"}
NUM_REQUESTS = 12
NUM_TOKENS = 100  # which take 2 s


class Cluster:
    """The two hosts, their cable, and what is started on them."""

    def __init__(self, folder, master: Host, node: Host, line: str, url: str) -> None:
        self.folder, self.master_host, self.node_host, self.url = folder, master, node, url
        self._line = line
        self.model = make_tiny_model(folder / "model")
        self.secret = self.write_secret("secret")

    def write_secret(self, name: str) -> str:
        path = self.folder / name
        path.write_text(secrets.token_hex(32))
        path.chmod(0o600)
        return str(path)

    def start_master(self) -> Program:
        options = ("--host", "0.0.0.0", "--served-model-name", "model", *self._options())
        options += ("--detokenizer-count", "2")  # the node hears of it
        return self.master_host.start(RINGCAST, "serve", str(self.model), *options, **SLOW)

    def start_node(self, *more: str, model=None) -> Program:
        options = ("--headless", "--data-parallel-start-rank", "1", *self._options(), *more)
        return self.node_host.start(RINGCAST, "serve", str(model or self.model), *options, **SLOW)

    def _options(self) -> tuple[str, ...]:
        return (
            *("--device", "fake", "--load-format", "dummy", "--num-gpu-blocks-override", "256"),
            *("--data-parallel-size", "2", "--data-parallel-size-local", "1"),
            *("--data-parallel-address", MASTER_IP, "--data-parallel-rpc-port", "13345"),
            *("--cluster-secret-file", self.secret),
        )

    def pull_the_plug(self) -> None:
        self.master_host.do("ip", "link", "set", self._line, "down")

    def plug_in(self) -> None:
        self.master_host.do("ip", "link", "set", self._line, "up")

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def is_up(self) -> bool:
        try:
            actors = self.get("/status")["actors"]
        except OSError:
            return False
        return all(actor["state"] == "ready" for actor in actors)

    def forwarded(self) -> float:
        """Records that the node's replica has been sent."""
        edges = self.get("/status")["edges"]
        return sum(edge["records"] for edge in edges if edge["name"] == "tokenizer.0>scheduler.1")


class Load:
    """Requests that are under way at once."""

    def __init__(self, cluster: Cluster) -> None:
        self.texts: dict[int, str] = {}
        self.errors: list[Exception] = []
        self._url = cluster.url
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(NUM_REQUESTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, i: int) -> None:
        body = {"model": "model", "prompt": f"prompt {i}", "max_tokens": NUM_TOKENS}
        request = urllib.request.Request(
            self._url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                self.texts[i] = json.load(answer)["choices"][0]["text"]
        except (OSError, ValueError, KeyError) as error:
            self.errors.append(error)

    def results(self) -> dict[int, str]:
        for thread in self._threads:
            thread.join(60)
        assert not self.errors, self.errors
        return self.texts


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if REASON:
        pytest.skip(REASON)
    pid = os.getpid()
    outside = f"10.{200 + pid % 50}.{pid // 50 % 250}"
    with contextlib.ExitStack() as stack:
        master, node = (stack.enter_context(Host(name)) for name in ("master", "node-a"))
        stack.enter_context(cable(None, f"{outside}.1", master, f"{outside}.2"))
        line = stack.enter_context(cable(master, MASTER_IP, node, NODE_IP))
        folder = tmp_path_factory.mktemp("cluster")
        yield Cluster(folder, master, node, line, f"http://{outside}.2:8000")


@pytest.fixture(scope="module")
def master(cluster):
    return cluster.start_master()


def test_who_is_another_is_refused_on_both_sides(cluster, master):
    """Before any node has come; the master goes on waiting."""
    master.until_said("waiting for rank 1")
    other_secret = cluster.write_secret("other")
    more = ("--cluster-secret-file", other_secret, "--data-parallel-join-timeout", "3")
    stranger = cluster.start_node(*more)
    assert stranger.wait() == 1
    assert f"no answer from {MASTER_IP}:13346 for 3 s" in stranger.said
    assert "is the cluster secret (--cluster-secret-file) the same?" in stranger.said
    master.until_said("is refused: it hasn't shown this cluster's secret")
    model = make_tiny_model(cluster.folder / "other-model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    other = cluster.start_node(model=model)
    assert other.wait() == 2
    reason = f"the node's model '{model}' is not the master's '{cluster.model}'"
    assert reason in other.said
    master.until_said(f"node node-a is refused: {reason}")


@pytest.fixture(scope="module")
def node(cluster, master):
    node = cluster.start_node()
    node.until_said(f"rank 1 serves the master at {MASTER_IP}:13346")
    master.until_said("ready in")
    return node


@pytest.fixture(scope="module")
def undisturbed(cluster, node):
    return Load(cluster).results()


def test_both_hosts_serve_one_endpoint(cluster, master, node, undisturbed):
    assert len(undisturbed) == NUM_REQUESTS
    assert all(undisturbed.values())
    assert cluster.forwarded() >= NUM_REQUESTS / 3
    names = {actor["name"] for actor in cluster.get("/status")["actors"]}
    assert {"scheduler.0", "worker.0", "scheduler.1"} <= names
    assert "worker.1" not in names
    until(lambda: cluster.get("/status")["statistics"].get("scheduler.1.generation_tokens", 0) > 0)


def test_the_death_of_the_tokenizer_or_detokenizer_concerns_no_node(cluster, node, undisturbed):
    for victim in ("tokenizer.0", "detokenizer.0"):
        before = {actor["name"]: actor for actor in cluster.get("/status")["actors"]}
        load = _under_way(cluster)
        os.kill(_outer_pid(cluster.master_host, before[victim]["pid"]), signal.SIGKILL)
        assert load.results() == undisturbed
        until(cluster.is_up)
        after = {actor["name"]: actor for actor in cluster.get("/status")["actors"]}
        assert after[victim]["restarts"] == before[victim]["restarts"] + 1
        assert after["scheduler.1"]["pid"] == before["scheduler.1"]["pid"]


def test_a_cut_cable_costs_no_request_and_the_node_comes_back(cluster, master, node, undisturbed):
    load = _under_way(cluster)
    cluster.pull_the_plug()
    try:
        assert load.results() == undisturbed
        master.until_said("node node-a went silent")
        node.until_said(f"the master at {MASTER_IP}:13346 went silent")
        assert Load(cluster).results() == undisturbed
    finally:
        cluster.plug_in()
    master.until_said("scheduler.1 back after")
    until(cluster.is_up)
    sent = cluster.forwarded()
    assert Load(cluster).results() == undisturbed
    assert cluster.forwarded() > sent


def test_either_side_is_killed_and_comes_back(cluster, master, node, undisturbed):
    times = master.said.count("scheduler.1 back after")
    load = _under_way(cluster)
    node.kill()
    successor = cluster.start_node()
    while "serves the master" not in successor.said:
        assert Load(cluster).results() == undisturbed
    assert load.results() == undisturbed
    master.until_said("scheduler.1 back after", times + 1)
    sent = cluster.forwarded()
    assert Load(cluster).results() == undisturbed
    assert cluster.forwarded() > sent
    master.kill()  # which the node outlives
    successor.until_said(f"the master at {MASTER_IP}:13346 has closed the connection")
    following = cluster.start_master()
    successor.until_said("joining again")
    successor.until_said("serves the master", 2)
    following.until_said("ready in")
    until(cluster.is_up)
    assert Load(cluster).results() == undisturbed
    successor.signal(signal.SIGTERM)
    assert successor.wait() == 0
    following.until_said("node node-a has left: it is being shut down")
    assert Load(cluster).results() == undisturbed
    following.signal(signal.SIGTERM)
    assert following.wait() == 0


def _under_way(cluster: Cluster) -> Load:
    """Requests, of which the node has at least one."""
    sent = cluster.forwarded()
    load = Load(cluster)
    until(lambda: cluster.forwarded() > sent)
    return load


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
