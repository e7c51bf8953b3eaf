"""Stages of the device's runner against one process of the CPU's, token by token: in one process,
with references of most kernels; and as processes whose kernels are interpreted.
"""

from __future__ import annotations

import os

import pytest
import torch
from executor.gpu.conftest import ReadsAtOnce, TwoRunners, load, random_tokens
from executor.gpu.one_rank import Order, generate_in_stages, run_ranks

from executor.gpu import conftest
from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu import runner
from ringcast.executor.gpu.parallel import Layout, Shape
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.gpu.stages import Plan
from ringcast.executor.gpu.work import Work
from ringcast.kernels.gpu.blocks import copy_blocks_reference
from ringcast.kernels.gpu.stage_pipe import FLAGS_BYTES
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError
from ringcast.mq.sampling_params import SamplingParams

pytestmark = pytest.mark.interpreted  # test_stages_on_device.py has devices


class Stages:
    """Runners of all stages, one after the other: so what one waits for is always there."""

    def __init__(self, spec, count, **options):
        options |= {"pipeline_parallel_size": count}
        memory_fd = os.memfd_create("workers")
        try:
            self.runners = [
                load(spec, GpuModelRunner, number, torch.device("cpu"), memory_fd, **options)
                for number in range(count)
            ]
        finally:
            os.close(memory_fd)

    def launch(self, plan):
        *others, last = [each.launch(plan) for each in self.runners]
        for pending in others:
            output = pending.read()
            assert (output.rows, output.token_ids) == (b"", b"")
            assert (output.logprobs, output.prompt_logprobs) == (None, [])
        return last


@pytest.fixture
def stages(specs, monkeypatch):
    def make(name, count=2, against=True, **options):
        conftest.take_references(monkeypatch)
        monkeypatch.setattr(runner, "copy_blocks", copy_blocks_reference)
        mine = Stages(specs[name], count, **options)
        reference = load(specs[name], CpuModelRunner, **options) if against else None
        return TwoRunners(mine, reference, 16, len(mine.runners[0]._decoder.groups))

    return make


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gemma3", 2),
        pytest.param("llama", 2, marks=pytest.mark.slow),
        pytest.param("gemma3", 3, marks=pytest.mark.slow),
        pytest.param("qwen3 experts", 2, marks=pytest.mark.slow),
        pytest.param("qwen3", 2, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, marks=pytest.mark.slow),
    ],
)
def test_stages_have_the_tokens_of_one(name, count, stages):
    s = stages(name, count)
    s.enter(3, random_tokens(1, 43))
    s.run({3: 43})
    s.run({3: 1})  # alone: a way of its own
    s.enter(0, random_tokens(2, 37))
    s.enter(5, random_tokens(3, 1))
    s.launch({0: 10, 3: 1})
    s.launch({0: 26, 5: 1})  # the next chunk of a prompt, before the last one has come back
    s.read()
    s.launch({0: 1, 3: 1})
    s.read()
    s.read()
    s.run({0: 1, 3: 1, 5: 1})
    assert [len(s.known[row]) for row in (0, 3, 5)] == [39, 48, 3]


def test_each_stage_has_its_own_part(specs, stages):
    s = stages("gemma3", 2, against=False)
    first, last = (each._decoder for each in s.mine.runners)
    assert [len(each._layers) for each in (first, last)] == [2, 1]
    assert [group.spec for group in first.groups] == [group.spec for group in last.groups]
    whole = load(specs["gemma3"], GpuModelRunner, 0, torch.device("cpu"))._decoder
    table = 67 * 32 * 4  # which both have, as it is tied
    assert first.num_bytes + last.num_bytes == whole.num_bytes + table
    layers = [layer for each in (first, last) for layer in each._layers]
    for one, other in zip(layers, whole._layers, strict=True):
        assert torch.equal(one.qkv.weight_NK, other.qkv.weight_NK)
        assert (one.window, one.rope) == (other.window, other.rope)
    assert [each.details()["stages"] for each in s.mine.runners] == [2, 2]


@pytest.mark.slow
def test_any_options_of_sampling_are_the_last_stages(stages):
    s = stages("llama")
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=2, ignore_eos=True)
    s.enter(1, random_tokens(4, 30), params=params)
    s.enter(2, random_tokens(5, 20), params=SamplingParams(temperature=0.0, prompt_logprobs=2))
    output = s.run({1: 30, 2: 20})
    assert len(output.prompt_logprobs) > 1
    for _ in range(3):
        assert s.run({1: 1, 2: 1}).logprobs is not None


def test_a_row_that_is_taken_by_another_while_its_token_is_under_way(stages):
    """The token is told when a part of the new one's prompt is computed."""
    s = stages("qwen3")
    for row in (1, 2):
        s.enter(row, random_tokens(row, 20))
    s.launch({1: 20})
    s.launch({2: 20})
    s.remove(1)
    s.enter(1, random_tokens(3, 25))
    s.launch({1: 10})
    s.read()
    s.known[1].pop()  # which was the one's before
    s.launch({1: 15})
    for _ in range(3):
        s.read()
    for _ in range(3):
        s.launch({2: 1})
        s.launch({1: 1})
        s.read()
        s.read()


@pytest.mark.slow
def test_a_fork_copies_blocks_of_every_stage(stages):
    s = stages("llama")
    prompt = random_tokens(8, 20)
    s.enter(1, prompt)
    s.run({1: 20})
    forked = [s.blocks[1][0], s.copy(s.blocks[1][1])]
    s.enter(2, [*prompt, 17], computed=20, blocks=forked)
    for _ in range(2):
        s.run({1: 1, 2: 1})


def test_nothing_is_handed_on_before_a_stage_is_open(specs, monkeypatch):
    """Whatever a stage launches to warm up."""
    conftest.take_references(monkeypatch)
    memory_fd = os.memfd_create("workers")
    config = build(
        EngineConfig, conftest.with_defaults({"pipeline_parallel_size": 2, "dtype": "float32"})
    )
    made = []
    for number in range(2):
        one = GpuModelRunner(config, specs["llama"], number, torch.device("cpu"), memory_fd)
        one._load_weights(lambda *_: None)
        one._make_buffers()
        one._decoder.set_cache(4)
        made.append(one)
    os.close(memory_fd)
    for one in reversed(made):  # the last stage first: it has nobody to wait for
        for size in (1, 2):
            one._batch.prepare_decode(size, pdl=False)
            one._decoder.forward(Work(size, size, 129))
    ends = made[0]._stage._outlet, made[1]._stage._inlet
    assert not any(pipe.end.launches.any() for pipe in ends)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_worker_shares(ranks):
    options = {"tensor_parallel_size": ranks, "pipeline_parallel_size": 3, "device": "fake"}
    shape = Shape(64, 4096, 64128, 33, torch.bfloat16)
    plans = [
        Plan(build(EngineConfig, options), worker, shape, has_long=True)
        for worker in range(3 * ranks)
    ]
    (size,) = {plan.num_bytes for plan in plans}
    group = Layout(shape, ranks, has_long=True).num_bytes if ranks > 1 else 0
    # Three steps in flight: four slots.
    assert 0 <= size - group - FLAGS_BYTES - 4 * 64 * 8192 < 256
    assert [plan.is_output for plan in plans].index(True) == 2 * ranks
    assert sum(plan.is_output for plan in plans) == 1
    assert all(plan.mail == (2 * ranks, 3, 33) for plan in plans)
    assert [plan.position.number for plan in plans] == [i // ranks for i in range(3 * ranks)]


def test_more_stages_than_layers(specs):
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size = 3: .* 2 layers"):
        load(specs["llama"], GpuModelRunner, 0, torch.device("cpu"), pipeline_parallel_size=3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("gemma3", 1), ("qwen3", 2)])
def test_stages_as_processes_with_every_kernel(name, ranks, specs):
    prompts = [random_tokens(1, 5), random_tokens(2, 3)]
    sizes = {"tensor_parallel_size": ranks, "pipeline_parallel_size": 2}
    order = Order(specs[name], {"device": "cpu"} | sizes, prompts, num_tokens=3)
    want = generate_in_stages(ReadsAtOnce(load(specs[name], CpuModelRunner)), order)
    answers = run_ranks(order, timeout=280)
    assert [answer.tokens for answer in answers[ranks:]] == [want] * ranks
    assert [answer.tokens for answer in answers[:ranks]] == [prompts] * ranks  # they answer none
