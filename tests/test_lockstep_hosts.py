"""Two hosts share the experts of a mixture, each in namespaces of its own (see test_headless.py).

Real processes on processors. What a request gives is what one process makes of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import urllib.error
import urllib.request

import pytest
from in_process import tiny_engine
from namespaces import Host, Program, cable, lacking
from serving import until
from simulation.reference import decode, encode
from test_headless import MASTER_IP, NODE_IP, Cluster, _outer_pid
from test_lockstep import make_served_mixture

from ringcast import SamplingParams

pytestmark = pytest.mark.slow
REASON = lacking()
NUM_REQUESTS = 6
LONG = 200.0  # seconds that both hosts together may take to start
LENGTH = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
NODE_UNIT = ("worker.0", "mirror.0", "scheduler.0", "scheduler.1")


class Together(Cluster):
    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.model = make_served_mixture(self.folder / "mixture")

    def _options(self) -> tuple[str, ...]:
        return (
            *("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--block-size", "4"),
            *("--num-gpu-blocks-override", "400", "--enable-expert-parallel"),
            *("--data-parallel-size", "2", "--data-parallel-size-local", "1"),
            *("--data-parallel-address", MASTER_IP, "--data-parallel-rpc-port", "13345"),
            *("--cluster-secret-file", self.secret),
        )

    def is_ready(self) -> bool:
        try:
            urllib.request.urlopen(self.url + "/ready", timeout=30).close()
        except urllib.error.HTTPError as error:
            with error:
                return error.code != 503
        return True

    def steps(self, replica: int) -> dict[str, float]:
        values = self.get("/status")["statistics"]
        start = f"scheduler.{replica}."
        return {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}


class Streams:
    """Requests that are under way at once; `begun` are those that have said something."""

    def __init__(self, cluster: Cluster) -> None:
        self.begun: set[int] = set()
        self._url, self._said = cluster.url, [""] * NUM_REQUESTS
        self._errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(NUM_REQUESTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, i: int) -> None:
        body = {"model": "model", "prompt": f"prompt {i}", "stream": True, **LENGTH}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            self._url + "/v1/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=2 * LONG) as answer:
                for line in answer:
                    if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                        self._said[i] += json.loads(line[6:])["choices"][0]["text"]
                        self.begun.add(i)
        except (OSError, ValueError, KeyError) as error:
            self._errors.append(error)

    def under_way(self) -> Streams:
        until(lambda: len(self.begun) == NUM_REQUESTS, LONG)
        assert any(thread.is_alive() for thread in self._threads)
        return self

    def texts(self) -> list[str]:
        for thread in self._threads:
            thread.join(2 * LONG)
        assert not self._errors, self._errors
        return self._said


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
        yield Together(folder, master, node, line, f"http://{outside}.2:8000")


@pytest.fixture(scope="module")
def want(cluster):
    """By one process."""
    alone = tiny_engine(cluster.model, load_format="auto", max_model_len=512)
    prompts = [encode(f"prompt {i}") for i in range(NUM_REQUESTS)]
    tokens = alone.generate(prompts, SamplingParams(**LENGTH))
    return [decode(each, final=True) for each in tokens]


def test_who_deals_other_experts_is_refused(cluster, want):
    master = cluster.start_master()
    master.until_said("waiting for a headless host with rank 1", seconds=LONG)
    other = cluster.start_node("--tensor-parallel-size", "2")
    assert other.wait(LONG) == 2
    assert "tensor_parallel_size = 2 on the node and 1 on the master" in other.said
    master.kill()


@pytest.fixture(scope="module")
def master(cluster):
    return cluster.start_master()


@pytest.fixture(scope="module")
def node(cluster, master):
    node = cluster.start_node()
    node.until_said("rank 1 serves the master", seconds=LONG)
    master.until_said("ready in", seconds=LONG)
    return node


def test_the_tokens_of_one_process(cluster, master, node, want):
    assert Streams(cluster).texts() == want
    for replica in range(2):  # what they say of themselves comes now and then
        until(lambda r=replica: cluster.steps(r)["generation_tokens"] > LENGTH["max_tokens"] / 2)
    until(lambda: cluster.steps(0)["waves"] == cluster.steps(1)["waves"] > 0)
    assert cluster.get("/status")["statistics"]["mirror.0.mirrored_out"] > 0


def test_a_node_that_is_killed_and_comes_back_costs_no_request(cluster, master, node, want):
    before = _pids(cluster)
    streams = Streams(cluster).under_way()
    node.kill()
    master.until_said("node node-a has closed the connection", seconds=LONG)
    until(lambda: not cluster.is_ready(), LONG)
    node = cluster.start_node()
    assert streams.texts() == want
    master.until_said("scheduler.1 back after", seconds=LONG)
    changed = {name for name, pid in _pids(cluster).items() if before[name] != pid}
    assert changed == set(NODE_UNIT)
    assert cluster.is_ready()
    _end_of_coordinator(cluster, want)
    _end_of_worker(cluster, node, master, want)


def _end_of_coordinator(cluster, want) -> None:
    """It is of no replica's unit, on either host."""
    before = _pids(cluster)
    streams = Streams(cluster).under_way()
    os.kill(_outer_pid(cluster.master_host, before["coordinator.0"]), signal.SIGKILL)
    assert streams.texts() == want
    until(cluster.is_up, LONG)
    assert Streams(cluster).texts() == want  # in a wave that the new one has started
    assert {name for name, pid in _pids(cluster).items() if before[name] != pid} == {
        "coordinator.0"
    }


def _end_of_worker(cluster, node: Program, master: Program, want) -> None:
    """The death of either side's worker is all replicas' death; both sides live on."""
    times = master.said.count("scheduler.1 back after")
    for host, name in ((cluster.master_host, "worker.0"), (cluster.node_host, "worker.1")):
        streams = Streams(cluster).under_way()
        os.kill(_worker(host), signal.SIGKILL)
        assert streams.texts() == want, name
        node.until_said("joining again", times, seconds=LONG)
        times += 1
        master.until_said("scheduler.1 back after", times, seconds=LONG)
    # A cable that is cut: neither side hears of it at once.
    streams = Streams(cluster).under_way()
    cluster.pull_the_plug()
    try:
        master.until_said("node node-a went silent", seconds=LONG)
        node.until_said("went silent", seconds=LONG)
        until(lambda: not cluster.is_ready(), LONG)
    finally:
        cluster.plug_in()
    assert streams.texts() == want
    master.until_said("scheduler.1 back after", times + 1, seconds=LONG)
    node.signal(signal.SIGTERM)
    assert node.wait(LONG) == 0
    master.until_said("node node-a has left: it is being shut down", seconds=LONG)
    master.signal(signal.SIGTERM)
    assert master.wait(LONG) == 0


def _pids(cluster: Cluster) -> dict[str, int]:
    return {actor["name"]: actor["pid"] for actor in cluster.get("/status")["actors"]}


def _worker(host: Host) -> int:
    """The process id here of that host's worker: the one that has loaded torch."""
    space = os.readlink(f"/proc/{host.pid}/ns/pid")
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == space:
                with open(f"/proc/{name}/maps") as maps:
                    if "libtorch" in maps.read():
                        return int(name)
    raise AssertionError(f"no worker on {host.name}")
