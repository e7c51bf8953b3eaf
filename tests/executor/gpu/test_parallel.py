"""Two ranks of the device's runner against one of the CPU's, token by token: as threads, with
references of all kernels; and as processes whose kernels are interpreted.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from executor.gpu.conftest import MODELS, ReadsAtOnce, TwoRunners, load, random_tokens
from executor.gpu.one_rank import Order, generate, run_ranks
from executor.gpu.thread_ranks import threads

from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu.devices import check_peers
from ringcast.executor.gpu.graphs import LARGEST
from ringcast.executor.gpu.parallel import Layout, Shape, join_processes, place_in
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.kernels.gpu.all_reduce import FLAGS_BYTES, MOST_PROGRAMS
from ringcast.mq import codec
from ringcast.mq.errors import ConfigError
from ringcast.mq.sampling_params import SamplingParams

pytestmark = pytest.mark.interpreted  # test_parallel_on_device.py has devices

TWO = {"tensor_parallel_size": 2}
__all__ = ["threads"]  # a fixture


@pytest.mark.parametrize("name", MODELS)
def test_ranks_have_the_tokens_of_one(name, threads):
    s = threads(name)
    s.enter(3, random_tokens(1, 43))
    s.run({3: 43})
    s.run({3: 1})  # alone: a way of its own
    s.enter(0, random_tokens(2, 37))
    s.enter(5, random_tokens(3, 1))
    s.run({0: 10, 3: 1, 5: 1})
    s.run({5: 1, 0: 1, 3: 1})
    s.run({3: 1, 0: 26, 5: 1})
    for _ in range(3):
        s.run({0: 1, 3: 1, 5: 1})
    assert [len(s.known[row]) for row in (0, 3, 5)] == [41, 51, 7]
    calls = [group.calls for group in s.mine.groups]
    assert calls[0] == calls[1]


@pytest.mark.parametrize(
    ("name", "by_expert"),
    [
        pytest.param("mixtral", True, marks=pytest.mark.slow),
        pytest.param("mixtral", False, marks=pytest.mark.slow),
        pytest.param("qwen3 experts of 4", True, marks=pytest.mark.slow),
        ("qwen3 experts of 4", False),
    ],
)
def test_experts_are_split_or_dealt(name, by_expert, threads):
    s = threads(name, enable_expert_parallel=by_expert)
    decoders = [each._decoder for each in s.mine.runners]
    inner = 48 if name == "mixtral" else 24
    held, inner = (2, inner) if by_expert else (4, inner // 2)
    for rank, each in enumerate(decoders):
        assert each._layers[1].mlp.gate_up_ENH.shape == (held, 2 * inner, 32)
        assert each.config.experts.first == (2 * rank if by_expert else 0)
    s.enter(3, random_tokens(1, 23))
    s.run({3: 23})
    s.run({3: 1})  # alone: a way of its own
    s.enter(0, random_tokens(2, 17))
    s.enter(5, random_tokens(3, 1))
    s.run({0: 10, 3: 1, 5: 1})
    s.run({3: 1, 0: 7, 5: 1})
    for row in (1, 2, 4):
        s.enter(row, random_tokens(row, 2))
    s.run({1: 2, 2: 2, 4: 2})
    s.run(dict.fromkeys(range(6), 1))
    calls = [group.calls for group in s.mine.groups]
    assert calls[0] == calls[1]
    calls[0].clear()
    s.run({0: 1, 3: 1})
    assert calls[0] == ["sum", "norm", "norm", "norm", "sum", "gather", "broadcast"]


def test_a_decode_step_meets_as_often_as_it_must(threads):
    s = threads("qwen3")
    s.enter(1, random_tokens(1, 5))
    s.enter(2, random_tokens(2, 5))
    s.run({1: 5, 2: 5})
    (calls, _) = (group.calls for group in s.mine.groups)
    calls.clear()
    s.run({1: 1, 2: 1})
    assert calls == ["sum", "norm", "norm", "norm", "sum", "gather", "broadcast"]
    calls.clear()
    s.run({1: 1})
    assert calls == ["sum"] * 5 + ["gather", "broadcast"]


def test_any_options_of_sampling_are_rank_0s(threads):
    s = threads("llama")
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=2, ignore_eos=True)
    s.enter(1, random_tokens(4, 30), params=params)
    s.enter(2, random_tokens(5, 3))
    s.run({1: 30, 2: 3})
    for _ in range(3):
        output = s.run({1: 1, 2: 1})
        assert output.logprobs is not None


def test_prompts_logprobs_come_from_all_parts_of_the_vocabulary(specs, threads):
    s = threads("qwen3")
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    s.enter(1, random_tokens(4, 20), params=params)
    mine = s.run({1: 20}).prompt_logprobs
    alone = load(specs["qwen3"], GpuModelRunner, 0, torch.device("cpu"))
    t = TwoRunners(alone, None, 16, 1)
    t.enter(1, random_tokens(4, 20), params=params)
    theirs = t.run({1: 20}).prompt_logprobs
    assert len(mine) == len(theirs) > 1
    for one, other in zip(mine, theirs, strict=True):
        assert one.logprobs.token_ids == other.logprobs.token_ids
        ours, others = (codec.floats(each.logprobs.logprobs) for each in (one, other))
        np.testing.assert_allclose(ours, others, rtol=1e-4, atol=1e-5)


def test_graphs_hold_no_long_sums(threads):
    s = threads("qwen3", max_num_batched_tokens=512)
    launcher = s.mine.runners[0]._launcher
    assert launcher.plan_graphs()[1].kinds()[0].tokens == 512
    s.mine.groups[0].most_tokens = 128
    assert launcher.plan_graphs()[1].kinds()[0].tokens == 128


def test_two_steps_ahead_and_a_fork(threads):
    s = threads("llama")
    prompt = random_tokens(8, 20)
    s.enter(1, prompt)
    s.launch({1: 20})
    s.launch({1: 1})
    s.read()
    s.read()
    forked = [s.blocks[1][0], s.copy(s.blocks[1][1])]
    s.enter(2, [*prompt, 17], computed=20, blocks=forked)
    for _ in range(2):
        s.run({1: 1, 2: 1})


def test_what_cant_be_split_is_refused(specs):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 3: 4 heads"):
        load(specs["llama"], GpuModelRunner, 0, torch.device("cpu"), tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"quantized \(fp8.*with them it must be 1"):
        load(
            specs["llama"], GpuModelRunner, 0, torch.device("cpu"),
            tensor_parallel_size=2, quantization="fp8", dtype="bfloat16",
        )  # fmt: skip
    dealt = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match="dense, it has no experts"):
        load(specs["llama"], GpuModelRunner, 0, torch.device("cpu"), **dealt)
    with pytest.raises(ConfigError, match="5 experts can't be split so"):
        load(specs["qwen3 experts"], GpuModelRunner, 0, torch.device("cpu"), **dealt)
    with pytest.raises(ConfigError, match="takes 8 at most"):
        check_peers(16)


@pytest.mark.parametrize("has_long", [False, True])
@pytest.mark.parametrize("tokens", [64, 8192])
def test_places_lie_side_by_side(tokens, has_long):
    shape = Shape(tokens, 4096, 64128, 33, torch.bfloat16)
    layout = Layout(shape, 2, has_long)
    row = 8192
    # 4 MiB would be 512 rows, but every graph's sums are short.
    assert layout.most_tokens == min(tokens, LARGEST if has_long else MOST_PROGRAMS)
    places = [*layout.sums, layout.logits, layout.tokens, layout.num_bytes]
    sizes = [layout.most_tokens * row] * 3 + [33 * 64128 * 2, 33 * 4]
    assert places[0] == FLAGS_BYTES
    assert all(place % 256 == 0 for place in places)
    gaps = [b - a - size for a, b, size in zip(places, places[1:], sizes, strict=False)]
    assert all(0 <= gap < 256 for gap in gaps)


def test_long_sums_are_somebody_elses():
    memory_fd = os.memfd_create("ranks")
    shape = Shape(4, 8, 16, 4, torch.float32)
    group = join_processes(1, 2, memory_fd, shape)
    os.close(memory_fd)
    update = torch.ones(5, 8)
    assert group.place(0, update) is update
    short = group.place(2, update[:4])
    assert (short.shape, place_in(group._own, short)) == ((4, 8), group._layout.sums[2])
    group._long_sum = lambda x: x.mul_(3)
    out, residual = torch.full((5, 8), torch.nan), torch.full((5, 8), 2.0)
    group.sum(update, out)
    assert (out == 3).all()
    group.sum(update, residual, residual)
    assert (residual == 11).all()
    with group.at_rest():
        group.sum(update, out)
    assert (out == 9).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_ranks_as_processes_with_every_kernel(name, specs):
    prompts = [random_tokens(1, 5), random_tokens(2, 3)]
    order = Order(specs[name], {"device": "cpu"} | TWO, prompts, num_tokens=4)
    alone = load(specs[name], CpuModelRunner)
    want = generate(ReadsAtOnce(alone), order)
    answers = run_ranks(order, timeout=280)
    assert [answer.tokens for answer in answers] == [want, want]
