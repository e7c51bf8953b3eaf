"""Two hosts share the experts of a mixture, each in namespaces of its own (see test_headless.py).

Real processes on processors. What a request gives is what one process makes of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import urllib.error
import urllib.request

import pytest
from in_process import tiny_engine
from load import Load
from namespaces import MASTER_IP, Cluster, Host, Program
from serving import until
from simulation.reference import decode, encode
from test_lockstep import make_served_mixture

from ringcast import SamplingParams

pytestmark = pytest.mark.slow
PROMPTS = [f"prompt {i}" for i in range(6)]
LONG = 200.0  # seconds that both hosts together may take to start
LENGTH = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
NODE_UNIT = ("worker.0", "mirror.0", "scheduler.0", "scheduler.1")


def load(cluster: Cluster) -> Load:
    return Load(cluster.url, PROMPTS, seconds=2 * LONG, stream=True, **LENGTH)


def is_ready(cluster: Cluster) -> bool:
    try:
        urllib.request.urlopen(cluster.url + "/ready", timeout=30).close()
    except urllib.error.HTTPError as error:
        with error:
            return error.code != 503
    return True


def steps(cluster: Cluster, replica: int) -> dict[str, float]:
    start = f"scheduler.{replica}."
    values = cluster.statistics()
    return {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    options = (
        *("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--block-size", "4"),
        *("--num-gpu-blocks-override", "400", "--enable-expert-parallel"),
        *("--data-parallel-size", "2", "--data-parallel-size-local", "1"),
        *("--data-parallel-address", MASTER_IP, "--data-parallel-rpc-port", "13345"),
    )
    of_node = ("--data-parallel-start-rank", "1")
    model = make_served_mixture(folder / "mixture")
    with Cluster(folder, model, options, of_node=of_node).connected() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def want(cluster):
    """By one process."""
    alone = tiny_engine(cluster.model, load_format="auto", max_model_len=512)
    tokens = alone.generate([encode(prompt) for prompt in PROMPTS], SamplingParams(**LENGTH))
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
    assert load(cluster).texts() == want
    for replica in range(2):  # what they say of themselves comes now and then
        until(lambda r=replica: steps(cluster, r)["generation_tokens"] > LENGTH["max_tokens"] / 2)
    until(lambda: steps(cluster, 0)["waves"] == steps(cluster, 1)["waves"] > 0)
    assert cluster.statistics()["mirror.0.mirrored_out"] > 0


def test_a_node_that_is_killed_and_comes_back_costs_no_request(cluster, master, node, want):
    before = cluster.pids()
    streams = load(cluster).begun()
    node.kill()
    master.until_said("node node-a has closed the connection", seconds=LONG)
    until(lambda: not is_ready(cluster), LONG)
    node = cluster.start_node()
    assert streams.texts() == want
    master.until_said("scheduler.1 back after", seconds=LONG)
    changed = {name for name, pid in cluster.pids().items() if before[name] != pid}
    assert changed == set(NODE_UNIT)
    assert is_ready(cluster)
    _end_of_coordinator(cluster, want)
    _end_of_worker(cluster, node, master, want)


def _end_of_coordinator(cluster, want) -> None:
    """It is of no replica's unit, on either host."""
    before = cluster.pids()
    streams = load(cluster).begun()
    cluster.kill("coordinator.0")
    assert streams.texts() == want
    until(cluster.all_ready, LONG)
    assert load(cluster).texts() == want  # in a wave that the new one has started
    assert {name for name, pid in cluster.pids().items() if before[name] != pid} == {
        "coordinator.0"
    }


def _end_of_worker(cluster, node: Program, master: Program, want) -> None:
    """The death of either side's worker is all replicas' death; both sides live on."""
    times = master.said.count("scheduler.1 back after")
    for host, name in ((cluster.master, "worker.0"), (cluster.node, "worker.1")):
        streams = load(cluster).begun()
        os.kill(_worker(host), signal.SIGKILL)
        assert streams.texts() == want, name
        node.until_said("joining again", times, seconds=LONG)
        times += 1
        master.until_said("scheduler.1 back after", times, seconds=LONG)
    # A cable that is cut: neither side hears of it at once.
    streams = load(cluster).begun()
    with cluster.cut():
        master.until_said("node node-a went silent", seconds=LONG)
        node.until_said("went silent", seconds=LONG)
        until(lambda: not is_ready(cluster), LONG)
    assert streams.texts() == want
    master.until_said("scheduler.1 back after", times + 1, seconds=LONG)
    node.signal(signal.SIGTERM)
    assert node.wait(LONG) == 0
    master.until_said("node node-a has left: it is being shut down", seconds=LONG)
    master.signal(signal.SIGTERM)
    assert master.wait(LONG) == 0


def _worker(host: Host) -> int:
    """The process id here of that host's worker: the one that has loaded torch."""
    for pid in host.processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            if "libtorch" in maps.read():
                return pid
    raise AssertionError(f"no worker on {host.name}")
