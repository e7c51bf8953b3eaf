"""Tiny mixtures of experts through the device's runner, token by token against the CPU's on the
same plans. Here under Triton's interpreter where there is no device.
"""

from __future__ import annotations

import pytest
import torch
from executor.gpu.conftest import MIXTURES, SHAPE, load, make_model, random_tokens
from kernels.gpu.devices import DEVICE

from ringcast.executor.gpu.experts import ExpertRunner
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.models import find_model
from ringcast.kernels.gpu.expert_routing import DIRECT_TOKENS
from ringcast.mq.errors import ModelLoadError


@pytest.mark.slow
def test_every_kernel(pair):
    s = pair("qwen3 experts", kernels=True)
    s.enter(3, random_tokens(1, 14))
    s.run({3: 14})
    s.run({3: 1})  # alone: a way of its own
    s.enter(0, random_tokens(2, 9))
    s.run({0: 9, 3: 1})
    s.run({0: 1, 3: 1})
    assert [len(s.known[row]) for row in (0, 3)] == [11, 18]


@pytest.mark.parametrize("name", ["qwen3 experts", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_prefill_chunks_and_decode_together(name, pair):
    s = pair(name)
    s.enter(3, random_tokens(1, 30))
    s.run({3: 30})
    s.run({3: 1})
    s.enter(0, random_tokens(2, 20))
    s.enter(5, random_tokens(3, 1))
    s.run({0: 10, 3: 1, 5: 1})
    s.run({3: 1, 0: 10, 5: 1})
    for row in (1, 2, 4):
        s.enter(row, random_tokens(row, 2))
    s.run({1: 2, 2: 2, 4: 2})
    assert DIRECT_TOKENS < 6
    s.run(dict.fromkeys(range(6), 1))
    assert [len(s.known[row]) for row in (0, 3, 5)] == [22, 35, 4]


def test_dummy_weights(specs):
    runner = load(specs["mixtral"], GpuModelRunner, 0, DEVICE, load_format="dummy", seed=2)
    assert runner.details()["weights_bytes"] > 0


def test_quantized_experts_are_refused(tmp_path):
    changes = {"quantization_config": {"quant_method": "fp8"}}
    spec = make_model(tmp_path, "mixtral", **changes)
    with pytest.raises(ModelLoadError, match="not supported in a mixture of experts"):
        load(spec, GpuModelRunner, 0, DEVICE, dtype="bfloat16")


def test_every_way_has_a_number_of_tokens():
    """What warm-up runs: of each plan, and of a few tokens, which are not sorted."""
    config = find_model("MixtralForCausalLM").check(SHAPE | MIXTURES["mixtral"])
    runner = ExpertRunner(config.experts, "silu", 32, 256, torch.float32, torch.device("cpu"))
    steps = runner.steps(256)
    assert DIRECT_TOKENS in steps
    plans = [runner._plan(tokens) for tokens in range(1, 257)]
    assert {plans[tokens - 1] for tokens in steps} == {*plans}
    assert steps[-1] == 256
    of_two = ExpertRunner(config.experts, "silu", 32, 128, torch.float32, torch.device("cpu"), 2)
    assert of_two.steps(128) == sorted({tokens // 2 for tokens in steps} - {0})
