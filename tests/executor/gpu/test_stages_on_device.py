"""Pipeline parallelism of two stages, each on a device of its own, or on one that they share where
there are fewer: what stages hand on, in graphs and without; the same tokens as of one process. And
what needs two devices: an engine through its front door. Stages are processes of their own.

    python -P test_stages_on_device.py WORKER FILE      an end of test_the_pipe

FILE: descriptor of the workers' memory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from executor.gpu.conftest import MODELS, load, make_model, random_tokens
from executor.gpu.one_rank import (
    Order,
    generate_in_stages,
    join_stages_on_one_device,
    run_ranks,
)
from executor.gpu.processes import run_together
from executor.gpu.test_parallel_on_device import workers
from kernels.gpu.devices import DEVICE

from ringcast import LLM, SamplingParams
from ringcast.executor.gpu.parallel import Shape
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.gpu.stages import GpuStage, join_devices
from ringcast.kernels.gpu.stage_pipe import Item
from ringcast.mq.config import EngineConfig, build

pytestmark = pytest.mark.gpu
LIMIT = 90  # seconds for stages, of which a start takes most
TOKENS, HIDDEN, ROUNDS = 600, 1024, 60
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 6,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 400,
    "pipeline_parallel_size": 2,
}
PROMPTS = [random_tokens(seed, length) for seed, length in enumerate((70, 3, 100, 16, 1))]


def test_the_pipe():
    """Eager and replayed; steps of many sizes, and now this end is late, now that."""
    memory_fd = os.memfd_create("workers")
    arguments = [[str(worker), str(memory_fd)] for worker in range(2)]
    printed = run_together(__file__, arguments, LIMIT, [memory_fd])
    assert [each.split()[-1] for each in printed] == [b"done"] * 2


def check_pipe(worker: int, group_fd: int) -> None:
    shares = torch.cuda.device_count() < 2
    device = torch.device("cuda", 0 if shares else worker)
    torch.cuda.set_device(device)
    shape = Shape(TOKENS, HIDDEN, 64, 8, torch.bfloat16)
    if shares:
        stage = join_stages_on_one_device(OPTIONS, worker, group_fd, shape).stage
    else:
        stage = join_devices(build(EngineConfig, OPTIONS), worker, group_fd, shape, device).stage
    stage.open()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), torch.inference_mode():
        for round_ in range(ROUNDS):
            _check_item(stage, round_, device)
        for tokens in (1, 48):
            _check_in_a_graph(stage, tokens, device)
        stream.synchronize()
        _end_together(stage)
        stage.leave()
    print("done")


def _end_together(stage: GpuStage) -> None:
    """Memory that the last stage still writes flags into must be there."""
    mail = stage._mail
    assert mail is not None
    words = torch.zeros(1, 8)
    numbers = words.numpy().view(np.int32)[0]
    move = mail.bind(np.ones(1, np.int64), words)
    if stage.is_first:
        mail.wait()
        move()
        assert numbers.tolist() == [*range(8)]
    else:
        numbers[:] = range(8)
        move()


def _item(round_: int, tokens: int, device: torch.device) -> list[torch.Tensor]:
    """What both ends can make: the residual stream, an update, and a norm's weight."""
    generator = torch.Generator(device).manual_seed(round_)
    made = torch.randn(2, tokens, HIDDEN, generator=generator, device=device).bfloat16()
    return [*made, torch.rand(HIDDEN, generator=generator, device=device)]


def _want(round_: int, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor):
    added = update.float()
    if round_ % 3 == 0:
        return residual
    if round_ % 3 == 2:
        added = added * torch.rsqrt(added.square().mean(-1, keepdim=True) + 1e-6) * weight
    return (residual.float() + added).bfloat16()


def _be_late(stage: GpuStage, round_: int) -> None:
    if (round_ % 7 == 3) == stage.is_first and round_ % 7 in (3, 5):
        torch.cuda._sleep(20_000_000)


def _hand_on(stage: GpuStage, round_: int, item: list[torch.Tensor], pdl: bool) -> None:
    residual, update, weight = item
    extra = (None, None) if round_ % 3 == 0 else (update, weight if round_ % 3 == 2 else None)
    stage.send(Item(residual, *extra, 1e-6), pdl)


def _check_item(stage: GpuStage, round_: int, device: torch.device, pads: bool = True) -> None:
    """pads: the ends pad a step differently."""
    tokens = (1, 2, 31, 128, 129, TOKENS)[round_ % 6]
    item = _item(round_, tokens, device)
    _be_late(stage, round_)
    if stage.is_first:
        _hand_on(stage, round_, item, False)
        return
    more = min(tokens + round_ % 4, TOKENS) if pads else tokens
    out = torch.full((more, HIDDEN), torch.nan, dtype=torch.bfloat16, device=device)
    stage.receive(out, False)
    torch.testing.assert_close(out[:tokens], _want(round_, *item), rtol=2e-2, atol=2e-2)
    assert not out.isnan().any(), round_


def _check_in_a_graph(stage: GpuStage, tokens: int, device: torch.device) -> None:
    """Programmatic launches on both sides of each end, as in a decode step."""
    given = _item(0, tokens, device)
    out = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=device)

    def step() -> None:
        if stage.is_first:
            _hand_on(stage, 2, given, True)
        else:
            stage.receive(out, True)

    step()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    step()
    graph.capture_end()
    for round_ in range(ROUNDS):
        item = _item(round_, tokens, device)
        if stage.is_first:
            for mine, new in zip(given, item, strict=True):
                mine.copy_(new)
        _be_late(stage, round_)
        graph.replay()
        if not stage.is_first:
            torch.testing.assert_close(out, _want(2, *item), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", [*MODELS, "qwen3 experts"])
def test_two_stages_have_the_tokens_of_one(name, eager, specs):
    options = OPTIONS | {"dtype": "float32", "enforce_eager": eager}
    order = Order(specs[name], options, PROMPTS, num_tokens=12, any_params=True)
    check_stages(order, ranks=1)


@pytest.mark.parametrize("name", ["qwen3"])
def test_two_stages_of_two_ranks(name, specs):
    """Of which each has a device where there are four."""
    options = OPTIONS | {"dtype": "float32", "tensor_parallel_size": 2}
    check_stages(Order(specs[name], options, PROMPTS[:3], num_tokens=6), ranks=2)


def check_stages(order: Order, ranks: int) -> None:
    alone = order.options | {"pipeline_parallel_size": 1, "tensor_parallel_size": 1}
    want = generate_in_stages(load(order.spec, GpuModelRunner, 0, DEVICE, **alone), order)
    answers = run_ranks(order, LIMIT)
    assert all(answer.tokens == answers[-1].tokens for answer in answers[ranks:])
    assert [answer.compiled for answer in answers] == [[]] * 2 * ranks
    same = sum(a == b for a, b in zip(answers[-1].tokens, want, strict=True))
    assert same >= len(want) - 1, (answers[-1].tokens, want)  # one may part at a tie
    for answer in answers:
        assert (answer.details["graphs"] == 0) == bool(order.options.get("enforce_eager"))


@pytest.mark.two_devices
def test_long_prompts_and_measured_memory(tmp_path):
    """Two of 3000 tokens, which are more than graphs are made for; and each stage finds its own
    number of blocks.
    """
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "head_dim": 64}
    more = {"num_key_value_heads": 4, "num_hidden_layers": 5}
    spec = make_model(tmp_path / "wide", "llama", **sizes, **more)
    spec = msgspec.structs.replace(spec, max_model_len=4096)
    options = OPTIONS | {"max_num_batched_tokens": 8192, "num_gpu_blocks_override": 1200}
    prompts = [random_tokens(9, 3000), random_tokens(8, 2900)]
    check_stages(Order(spec, options | {"dtype": "float32"}, prompts, 6, chunk=8192), ranks=1)
    measured = {**OPTIONS, "num_gpu_blocks_override": None, "gpu_memory_utilization": 0.3}
    answers = run_ranks(Order(spec, measured, [random_tokens(1, 9)] * 2, num_tokens=3), LIMIT)
    weights = [answer.details["weights_bytes"] for answer in answers]
    assert weights[0] != weights[1]
    assert all(answer.details["num_blocks"] >= 6 * 256 for answer in answers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models") / "qwen3"
    sizes = {"max_position_embeddings": 512, "vocab_size": 512, "hidden_size": 64}
    make_model(place, "qwen3", num_hidden_layers=5, **sizes)
    return place


def llm(folder: Path, stages: int, **options: Any) -> LLM:
    return LLM(
        str(folder),
        device="cuda",
        dtype="float32",
        pipeline_parallel_size=stages,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=16,
        gpu_memory_utilization=0.3,
        step_timeout=30,
        startup_timeout=LIMIT,
        **options,
    )


def tokens_of(engine: LLM, num_tokens: int) -> list[list[int]]:
    """Of more sequences than are in one step, greedy and not."""
    params = [
        SamplingParams(
            temperature=i % 2, seed=i, max_tokens=num_tokens + i, ignore_eos=True, detokenize=False
        )
        for i in range(20)
    ]
    prompts = [{"prompt_token_ids": random_tokens(i, 1 + 7 * i)} for i in range(20)]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.two_devices
@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"max_steps_in_flight": 4}], ids=str
)
def test_an_engine_of_two_stages(options, folder):
    with llm(folder, 1, **options) as one:
        want = tokens_of(one, 40)
    with llm(folder, 2, **options) as two:
        for _ in range(2):
            got = tokens_of(two, 40)
            # In other batches products may be added up in another order.
            assert sum(a == b for a, b in zip(got, want, strict=True)) >= len(want) - 3


@pytest.mark.two_devices
@pytest.mark.parametrize("victim", [0, 1])
def test_an_engine_outlives_a_stage(victim, folder):
    with llm(folder, 2) as engine:
        want = tokens_of(engine, 40)
        pids = workers()
        assert len(pids) == 2, pids
        os.kill(pids[victim], signal.SIGKILL)
        end = time.monotonic() + LIMIT
        while True:  # until the unit is there again, requests may fail
            try:
                again = tokens_of(engine, 40)
                break
            except Exception:
                if time.monotonic() > end:
                    raise
        assert sum(a == b for a, b in zip(again, want, strict=True)) >= len(want) - 3


if __name__ == "__main__":
    check_pipe(int(sys.argv[1]), int(sys.argv[2]))
