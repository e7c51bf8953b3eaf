"""Two hosts serve one endpoint: a master and a headless node, each in namespaces of its own.

Real processes with the fake device. What a request gives is known from the first, undisturbed run.
"""

from __future__ import annotations

import json
import signal

import pytest
from load import Load
from namespaces import MASTER_IP, Cluster
from serving import until
from tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
NUM_REQUESTS = 12
NUM_TOKENS = 100  # which take 2 s


def load(cluster: Cluster) -> Load:
    prompts = [f"prompt {i}" for i in range(NUM_REQUESTS)]
    return Load(cluster.url, prompts, max_tokens=NUM_TOKENS)


def forwarded(cluster: Cluster) -> float:
    """Records that the node's replica has been sent."""
    edges = cluster.get("/status")["edges"]
    return sum(edge["records"] for edge in edges if edge["name"] == "tokenizer.0>scheduler.1")


def under_way(cluster: Cluster) -> Load:
    """Requests, of which the node has at least one."""
    sent = forwarded(cluster)
    requests = load(cluster)
    until(lambda: forwarded(cluster) > sent)
    return requests


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    options = (
        *("--device", "fake", "--load-format", "dummy", "--num-gpu-blocks-override", "256"),
        *("--data-parallel-size", "2", "--data-parallel-size-local", "1"),
        *("--data-parallel-address", MASTER_IP, "--data-parallel-rpc-port", "13345"),
    )
    of_master = ("--detokenizer-count", "2")  # the node hears of it
    of_node = ("--data-parallel-start-rank", "1")
    model = make_tiny_model(folder / "model")
    slow = {"RINGCAST_FAKE_STEP_SECONDS": "0.02"}
    with Cluster(folder, model, options, of_master, of_node, **slow).connected() as cluster:
        yield cluster


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
    return load(cluster).texts()


def test_both_hosts_serve_one_endpoint(cluster, master, node, undisturbed):
    assert len(undisturbed) == NUM_REQUESTS
    assert all(undisturbed)
    assert forwarded(cluster) >= NUM_REQUESTS / 3
    names = set(cluster.actors())
    assert {"scheduler.0", "worker.0", "scheduler.1"} <= names
    assert "worker.1" not in names
    until(lambda: cluster.statistics().get("scheduler.1.generation_tokens", 0) > 0)


def test_the_death_of_the_tokenizer_or_detokenizer_concerns_no_node(cluster, node, undisturbed):
    for victim in ("tokenizer.0", "detokenizer.0"):
        before = cluster.actors()
        requests = under_way(cluster)
        cluster.kill(victim)
        assert requests.texts() == undisturbed
        until(cluster.all_ready)
        after = cluster.actors()
        assert after[victim]["restarts"] == before[victim]["restarts"] + 1
        assert after["scheduler.1"]["pid"] == before["scheduler.1"]["pid"]


def test_a_cut_cable_costs_no_request_and_the_node_comes_back(cluster, master, node, undisturbed):
    requests = under_way(cluster)
    with cluster.cut():
        assert requests.texts() == undisturbed
        master.until_said("node node-a went silent")
        node.until_said(f"the master at {MASTER_IP}:13346 went silent")
        assert load(cluster).texts() == undisturbed
    master.until_said("scheduler.1 back after")
    until(cluster.all_ready)
    sent = forwarded(cluster)
    assert load(cluster).texts() == undisturbed
    assert forwarded(cluster) > sent


def test_either_side_is_killed_and_comes_back(cluster, master, node, undisturbed):
    times = master.said.count("scheduler.1 back after")
    requests = under_way(cluster)
    node.kill()
    successor = cluster.start_node()
    while "serves the master" not in successor.said:
        assert load(cluster).texts() == undisturbed
    assert requests.texts() == undisturbed
    master.until_said("scheduler.1 back after", times + 1)
    sent = forwarded(cluster)
    assert load(cluster).texts() == undisturbed
    assert forwarded(cluster) > sent
    master.kill()  # which the node outlives
    successor.until_said(f"the master at {MASTER_IP}:13346 has closed the connection")
    following = cluster.start_master()
    successor.until_said("joining again")
    successor.until_said("serves the master", 2)
    following.until_said("ready in")
    until(cluster.all_ready)
    assert load(cluster).texts() == undisturbed
    successor.signal(signal.SIGTERM)
    assert successor.wait() == 0
    following.until_said("node node-a has left: it is being shut down")
    assert load(cluster).texts() == undisturbed
    following.signal(signal.SIGTERM)
    assert following.wait() == 0
