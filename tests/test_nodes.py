"""One engine over two hosts, each in namespaces of its own: a master with the API server, and a
headless node. Real processes on the processor, and a model whose weights are drawn.

What requests give is known from one process that has the whole model.
"""

from __future__ import annotations

import json
import signal

import pytest
import torch
from in_process import tiny_engine
from load import Load
from namespaces import MASTER_IP, Cluster
from random_models import RandomWeights
from safetensors.torch import save_file
from serving import until
from tiny_model import make_tiny_model

from ringcast import SamplingParams
from ringcast.executor.cpu_decoder import CpuDecoder
from ringcast.executor.layers import Layout
from ringcast.executor.models import find_model

pytestmark = pytest.mark.slow
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


def load(cluster: Cluster) -> Load:
    """All prompts at once."""
    body = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    ids = {"logprobs": 0, "return_tokens_as_token_ids": True}
    return Load(cluster.url, PROMPTS, seconds=120, **body, **ids)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    options = (
        *("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--deterministic"),
        *("--max-num-batched-tokens", "48", "--max-model-len", "256"),
        *("--block-size", "4", "--num-gpu-blocks-override", "200"),
        *("--nnodes", "2", "--master-addr", MASTER_IP, "--master-port", str(PORT)),
    )
    model = make_model(folder / "model")
    ranks = [("--node-rank", rank) for rank in ("0", "1")]
    with Cluster(folder, model, options, *ranks).connected() as cluster:
        yield cluster


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
    assert load(cluster).tokens() == want
    names = set(cluster.actors())
    assert {"scheduler.0", "worker.0", "gateway.1"} <= names
    assert not {"worker.3" if sizes == "both" else "worker.1"} & names
    for way in ("out", "in"):  # what it says of itself comes now and then
        key = f"gateway.1.mirrored_{way}"
        until(lambda key=key: cluster.statistics()[key] > 10_000)
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
    streams = load(cluster).begun()
    node.kill()
    master.until_said("has closed the connection; waiting for node 1; restarting")
    node = cluster.start_node(*SIZES[sizes])
    assert streams.tokens() == want
    master.until_said("back after")
    streams = load(cluster).begun()
    with cluster.cut():
        master.until_said("node node-a went silent")
        node.until_said(f"the master at {MASTER_IP}:{PORT} went silent")
    assert streams.tokens() == want
    node.until_said("joining again")
    streams = load(cluster).begun()
    cluster.kill("worker.0")
    assert streams.tokens() == want
    node.until_said("joining again", 2)
    master.kill()
    node.until_said("joining again", 3)
    master = cluster.start_master(*SIZES[sizes])
    master.until_said("ready in", seconds=200)
    assert load(cluster).tokens() == want
    for program in (node, master):
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
