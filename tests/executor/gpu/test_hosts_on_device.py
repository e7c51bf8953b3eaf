"""Workers on two hosts that are one, and share a device where there is only one: NCCL between them,
in graphs and without; the same tokens as of one worker. And an engine of two programs, which are
served through the front door, and one of which dies.

    python -P test_hosts_on_device.py WHAT WORKER FILE      a worker of test_what_crosses

FILE: descriptor of the workers' memory. Each host has an NCCL_HOSTID of its own: else NCCL refuses
two workers of one device.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executor.gpu.conftest import load, make_model, random_tokens
from executor.gpu.one_rank import Order, generate, generate_in_stages, run_ranks
from executor.gpu.processes import run_together
from kernels.gpu.devices import DEVICE
from serving import Server, command, serve
from tiny_model import make_tiny_model

from executor.gpu import test_parallel_on_device as ranks
from executor.gpu import test_stages_on_device as stages
from ringcast.executor.gpu.hosts import join_hosts
from ringcast.executor.gpu.nccl_group import NcclGroup, NcclPipe
from ringcast.executor.gpu.parallel import Shape
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.gpu.stages import GpuStage
from ringcast.executor.runner import OtherHosts
from ringcast.kernels.gpu.norm import AddNorm
from ringcast.mq.config import EngineConfig, build

pytestmark = pytest.mark.gpu
LIMIT = 150  # seconds for workers, of which a start takes most
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_num_seqs": 6,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 400,
}
PROMPTS = [random_tokens(seed, length) for seed, length in enumerate((70, 3, 100, 16, 1))]


@pytest.mark.parametrize("what", ["ranks", "stages"])
def test_what_crosses(what):
    """Sums, logits and tokens of two ranks; items of two stages. Eager and replayed."""
    memory_fd = os.memfd_create("workers")
    arguments = [[what, str(worker), str(memory_fd)] for worker in range(2)]
    hosts = [{"NCCL_HOSTID": f"host {worker}"} for worker in range(2)]
    printed = run_together(__file__, arguments, LIMIT, [memory_fd], environments=hosts)
    assert [each.split()[-1] for each in printed] == [b"done"] * 2


def check(what: str, worker: int, group_fd: int) -> None:
    device = torch.device("cuda", worker % torch.cuda.device_count())
    torch.cuda.set_device(device)
    shape = Shape(stages.TOKENS, ranks.HIDDEN, ranks.VOCABULARY, ranks.SAMPLES, torch.bfloat16)
    sizes = TENSOR if what == "ranks" else PIPELINE
    config = build(EngineConfig, OPTIONS | sizes)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), torch.inference_mode():
        others = OtherHosts(0, 1, "127.0.0.1")
        group, stage = join_hosts(config, worker, others, group_fd, shape, device)
        if what == "ranks":
            assert isinstance(group, NcclGroup)
            _check_ranks(group, device)
        else:
            assert isinstance(stage._outlet or stage._inlet, NcclPipe)
            _check_stages(stage, device)
        stream.synchronize()
        # A launch that sends is done when NCCL's thread has what is to be sent; with its process
        # that would be lost.
        stage.agree(0, 0)
        stage.leave()
    print("done", flush=True)
    os._exit(0)


def _check_ranks(group: NcclGroup, device: torch.device) -> None:
    for tokens in (1, 3, 64, 500):
        ranks._check_sums_of(group, tokens, device)
    ranks._check_in_a_graph(group, device)
    _check_that_a_graph_has_the_same_bits(group, device)


def _check_that_a_graph_has_the_same_bits(group: NcclGroup, device: torch.device) -> None:
    given = ranks._parts(64, 9, device)[group.rank]
    part, out, residual = (torch.empty_like(given) for _ in range(3))
    weight = torch.rand(ranks.HIDDEN, device=device)

    def step() -> None:
        part.copy_(given)
        group.sum(part, residual)
        group.sum_add_rms_norm(part, AddNorm(residual, weight, out, 1e-6), False)

    step()
    want = out.clone(), residual.clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.current_stream().synchronize()
    graph.capture_begin(capture_error_mode="thread_local")
    step()
    graph.capture_end()
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want[0])
        assert torch.equal(residual, want[1])


def _check_stages(stage: GpuStage, device: torch.device) -> None:
    stage.open()
    for round_ in range(stages.ROUNDS):
        stages._check_item(stage, round_, device, pads=False)
    for tokens in (1, 48):
        stages._check_in_a_graph(stage, tokens, device)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen3", TENSOR),
        ("gemma3", TENSOR),
        ("qwen3", TENSOR | {"enforce_eager": True}),
        ("mixtral", TENSOR | {"enable_expert_parallel": True}),
        ("llama", PIPELINE),
        ("gemma3", PIPELINE),
        ("llama", PIPELINE | {"enforce_eager": True}),
        pytest.param("qwen3", TENSOR | PIPELINE, marks=pytest.mark.two_devices),
    ],
)
def test_two_hosts_have_the_tokens_of_one(name, more, specs):
    """With ranks and stages, each host has a stage, whose ranks map each other's memory."""
    order = Order(specs[name], OPTIONS | more, PROMPTS, num_tokens=8, any_params=True, hosts=2)
    size = more.get("tensor_parallel_size", 1)
    run = generate_in_stages if "pipeline_parallel_size" in more else generate
    alone = OPTIONS | {"enforce_eager": more.get("enforce_eager", False)}
    want = run(load(order.spec, GpuModelRunner, 0, DEVICE, **alone), order)
    answers = run_ranks(order, LIMIT)
    assert [answer.compiled for answer in answers] == [[]] * len(answers)
    assert all(answer.tokens == answers[-1].tokens for answer in answers[-size:])
    same = sum(a == b for a, b in zip(answers[-1].tokens, want, strict=True))
    assert same >= len(want) - 1, (answers[-1].tokens, want)  # one may part at a tie
    assert all((answer.details["graphs"] == 0) == alone["enforce_eager"] for answer in answers)
    assert len({answer.details["graphs"] for answer in answers}) == 1


# Two programs


NUM_TOKENS = 24
ENGINE = (
    *("--device", "cuda", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"),
    *("--gpu-memory-utilization", "0.1", "--step-timeout", "30", "--startup-timeout", str(LIMIT)),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "llama")
    make_model(folder, "llama", vocab_size=258, max_position_embeddings=512, hidden_size=64)
    return folder


@contextlib.contextmanager
def node(model: Path, options: tuple[str, ...], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    more = ("--headless", "--node-rank", "1")
    environment = os.environ | {"NCCL_HOSTID": "node"}
    with log.open("a") as file:
        process = subprocess.Popen(command(model, *options, *more), stderr=file, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        process.kill()
        process.wait()


def tokens_of(server: Server) -> list[list[str]]:
    body = {"model": "m", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
    found = []
    for prompt in PROMPTS[:3]:
        status, answer = server.post("/v1/completions", body | {"prompt": prompt}, timeout=LIMIT)
        assert status == 200, answer
        found.append(answer["choices"][0]["logprobs"]["tokens"])
    return found


@pytest.mark.parametrize("size", ["-tp", "-pp"])
def test_an_engine_of_two_programs_outlives_one(size, model, tmp_path):
    with serve(model, *ENGINE, "--served-model-name", "m") as server:
        want = tokens_of(server)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = (*ENGINE, size, "2", "--nnodes", "2", "--master-port", port)
    log = tmp_path / "node"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(node(model, options, log))
        more = ("--served-model-name", "m")
        server = stack.enter_context(serve(model, *options, *more, NCCL_HOSTID="master"))
        assert "worker.1" not in server.pids()
        _check_tokens(tokens_of(server), want)

        def kill() -> None:
            time.sleep(0.5)  # in the middle of it, mostly
            first.kill()
            first.wait()
            stack.enter_context(node(model, options, log))

        killer = threading.Thread(target=kill)
        killer.start()
        again = tokens_of(server)
        killer.join()
        _check_tokens(again, want)
        _check_tokens(tokens_of(server), want)
        assert "waiting for node 1; restarting" in server.said
        server.end(timeout=60)
    said = log.read_text()
    assert said.count("node 1 has joined the master at 127.0.0.1") == 2, said


def _check_tokens(got: list[list[str]], want: list[list[str]]) -> None:
    assert sum(a == b for a, b in zip(got, want, strict=True)) >= len(want) - 1, (got, want)


if __name__ == "__main__":
    check(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
