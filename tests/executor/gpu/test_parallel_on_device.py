"""Tensor parallelism of two ranks, each on a device of its own, or on one that they share where
there is only one: sums in graphs, the same tokens as of one rank. And what needs two devices: long
sums, and an engine through its front door. Ranks are processes of their own.

    python -P test_parallel_on_device.py RANK FILE      a rank of test_sums

FILE: descriptor of the ranks' memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from executor.gpu.conftest import MODELS, load, make_model, random_tokens
from executor.gpu.one_rank import Order, generate, join_on_one_device, run_ranks
from executor.gpu.processes import run_together
from kernels.gpu.devices import DEVICE

from ringcast import LLM, SamplingParams
from ringcast.executor.gpu.parallel import PeerGroup, Shape, join_devices
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.kernels.gpu.norm import AddNorm

pytestmark = pytest.mark.gpu
LIMIT = 70  # seconds for ranks, of which a start takes most
HIDDEN, VOCABULARY, SAMPLES, ROUNDS = 1024, 4001, 40, 50
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 5,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 400,
    "tensor_parallel_size": 2,
}
PROMPTS = [random_tokens(seed, length) for seed, length in enumerate((70, 3, 100, 16, 1))]


def test_sums():
    """Eager and replayed, short and long, with what the ranks say to each other in between."""
    memory_fd = os.memfd_create("ranks")
    arguments = [[str(rank), str(memory_fd)] for rank in range(2)]
    printed = run_together(__file__, arguments, LIMIT, [memory_fd])
    assert [each.split()[-1] for each in printed] == [b"done"] * 2


def check_sums(rank: int, group_fd: int) -> None:
    shares = torch.cuda.device_count() < 2
    device = torch.device("cuda", 0 if shares else rank)
    torch.cuda.set_device(device)
    shape = Shape(500 if shares else 8192, HIDDEN, VOCABULARY, SAMPLES, torch.bfloat16)
    if shares:
        group = join_on_one_device(rank, 2, group_fd, shape)
    else:
        group = join_devices(rank, 2, group_fd, shape, device, 60)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), torch.inference_mode():
        for tokens in (1, 3, 64, 500, 2000, 8000):
            if tokens <= shape.tokens:
                _check_sums_of(group, tokens, device)
        _check_in_a_graph(group, device)
        stream.synchronize()
        group.leave()
    print("done")


def _parts(tokens: int, round_: int, device: torch.device) -> list[torch.Tensor]:
    """Of both ranks: each can tell what the sum must be."""
    made = []
    for rank in range(2):
        generator = torch.Generator(device).manual_seed(1000 * round_ + rank)
        made.append(torch.randn(tokens, HIDDEN, generator=generator, device=device).bfloat16())
    return made


def _check_sums_of(group: PeerGroup, tokens: int, device: torch.device) -> None:
    update = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    for round_ in range(6):
        parts = _parts(tokens, round_, device)
        place = group.place(round_ % 3, update)
        place.copy_(parts[group.rank])
        out = torch.full_like(update, torch.nan)
        residual = parts[0] * 3
        group.sum(place, out, residual if round_ % 2 else None)
        want = parts[0].float() + parts[1].float()
        want = want + residual.float() if round_ % 2 else want
        torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=6e-2)


def _check_in_a_graph(group: PeerGroup, device: torch.device) -> None:
    """What a decode step does, replayed, with the next step's inputs made on the device."""
    tokens = 24
    update = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    given = torch.empty_like(update)
    residual, out = torch.zeros_like(update), torch.empty_like(update)
    weight = torch.ones(HIDDEN, device=device)
    logits = torch.zeros(tokens, 2 * VOCABULARY, dtype=torch.bfloat16, device=device)
    sampled = torch.zeros(SAMPLES, dtype=torch.int32, device=device)

    def step() -> None:
        part = group.place(0, update)
        part.copy_(given)
        group.sum(part, residual, pdl=True)
        for which in (1, 2, 1, 2):
            part = group.place(which, update)
            part.copy_(given)
            group.sum_add_rms_norm(part, AddNorm(residual, weight, out, 1e-6), True)
        own = group.own_logits(tokens)
        own.fill_(1 + group.rank)
        own[:, 0].copy_(given[:, 0])
        group.gather(own, None if group.rank else logits, True)
        if not group.rank:
            sampled[:tokens].copy_(logits[:, VOCABULARY] * 100)
        group.broadcast(sampled[:tokens], True)

    given.zero_()
    step()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    step()
    graph.capture_end()
    for round_ in range(ROUNDS):
        parts = _parts(tokens, round_, device)
        given.copy_(parts[group.rank])
        if group.rank == round_ % 2:  # one is late, now this, now that
            torch.cuda._sleep(2_000_000)
        graph.replay()
        both = parts[0].float() + parts[1].float()
        torch.testing.assert_close(residual.float(), 5 * both, rtol=3e-2, atol=0.3)
        want = residual.float()
        want *= torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-6)
        torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)
        assert torch.equal(sampled[:tokens], (parts[1][:, 0] * 100).int())
        if not group.rank:
            assert (logits[:, 1:VOCABULARY] == 1).all()
            assert (logits[:, VOCABULARY + 1 :] == 2).all()


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_two_devices_have_the_tokens_of_one(name, eager, specs):
    options = OPTIONS | {"dtype": "float32", "enforce_eager": eager}
    order = Order(specs[name], options, PROMPTS, num_tokens=12, any_params=True)
    one = load(order.spec, GpuModelRunner, 0, DEVICE, **options | {"tensor_parallel_size": 1})
    want = generate(one, order)
    answers = run_ranks(order, LIMIT)
    assert answers[0].tokens == answers[1].tokens
    assert [answer.compiled for answer in answers] == [[], []]
    same = sum(a == b for a, b in zip(answers[0].tokens, want, strict=True))
    assert same >= len(want) - 1, (answers[0].tokens, want)  # one may part at a tie
    assert (answers[0].details["graphs"] == 0) == eager


@pytest.mark.parametrize(
    ("name", "by_expert", "eager"),
    [
        ("mixtral", False, False),
        ("mixtral", True, False),
        ("mixtral", True, True),
        ("qwen3 experts of 4", True, False),
    ],
)
def test_two_devices_with_experts_have_the_tokens_of_one(name, by_expert, eager, specs):
    options = OPTIONS | {"dtype": "float32", "enforce_eager": eager}
    one = {**options, "tensor_parallel_size": 1}
    order = Order(
        specs[name], options | {"enable_expert_parallel": by_expert}, PROMPTS, num_tokens=12,
        any_params=True,
    )  # fmt: skip
    want = generate(load(order.spec, GpuModelRunner, 0, DEVICE, **one), order)
    answers = run_ranks(order, LIMIT)
    assert answers[0].tokens == answers[1].tokens
    assert [answer.compiled for answer in answers] == [[], []]
    same = sum(a == b for a, b in zip(answers[0].tokens, want, strict=True))
    assert same >= len(want) - 1, (answers[0].tokens, want)  # one may part at a tie
    assert (answers[0].details["graphs"] == 0) == eager


@pytest.mark.two_devices
def test_long_steps_are_nccls(specs, tmp_path):
    """And memory is measured: every rank has its own number of blocks."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "head_dim": 64}
    spec = make_model(tmp_path / "wide", "qwen3", num_key_value_heads=4, **sizes)
    spec = msgspec.structs.replace(spec, max_model_len=4096)
    options = OPTIONS | {"max_num_batched_tokens": 4096, "num_gpu_blocks_override": 1200}
    prompts = [random_tokens(9, 3000), random_tokens(8, 5)]
    order = Order(spec, options | {"dtype": "bfloat16"}, prompts, num_tokens=8, chunk=8192)
    answers = run_ranks(order, LIMIT)
    assert answers[0].tokens == answers[1].tokens
    measured = {**order.options, "num_gpu_blocks_override": None, "max_num_seqs": 4}
    short = Order(spec, measured, [random_tokens(1, 9)], num_tokens=3)
    answers = run_ranks(short, LIMIT)
    assert {answer.details["num_blocks"] for answer in answers} == {4 * 256 + 1}


FOLDER_SIZES = {"max_position_embeddings": 512, "vocab_size": 512, "hidden_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models") / "qwen3"
    make_model(place, "qwen3", **FOLDER_SIZES)
    return place


def llm(folder: Path, size: int) -> LLM:
    return LLM(
        str(folder),
        device="cuda",
        dtype="float32",
        tensor_parallel_size=size,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=16,
        gpu_memory_utilization=0.3,
        step_timeout=30,
        startup_timeout=LIMIT,
    )


def tokens_of(engine: LLM, num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = engine.generate(prompts, [params] * len(prompts), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.two_devices
def test_an_engine_of_two_devices_outlives_a_rank(folder):
    with llm(folder, 1) as one:
        want = tokens_of(one, 40)
    with llm(folder, 2) as two:
        got = tokens_of(two, 40)
        assert sum(a == b for a, b in zip(got, want, strict=True)) >= len(want) - 1
        pids = workers()
        assert len(pids) == 2, pids
        os.kill(pids[1], signal.SIGKILL)
        end = time.monotonic() + LIMIT
        while True:  # until the unit is there again, requests may fail
            try:
                again = tokens_of(two, 40)
                break
            except Exception:
                if time.monotonic() > end:
                    raise
        assert sum(a == b for a, b in zip(again, want, strict=True)) >= len(want) - 1


def workers() -> list[int]:
    """Descendants of this process that have a device open."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    for _ in range(8):
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(pid for pid in found - {os.getpid()} if _has_device(pid))


def _has_device(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(
            os.readlink(fd).startswith("/dev/nvidia-uvm")
            for fd in Path(f"/proc/{pid}/fd").iterdir()
        )
    return False


if __name__ == "__main__":
    check_sums(int(sys.argv[1]), int(sys.argv[2]))
