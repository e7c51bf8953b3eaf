"""Tiny mixtures of experts through the device's runner, token by token against the CPU's on the
same plans. Here under Triton's interpreter where there is no device.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from executor.gpu.conftest import MIXTURES, SHAPE, load, make_model, random_tokens
from kernels.gpu.devices import DEVICE

from ringcast.executor.gpu.batch import REPLICAS
from ringcast.executor.gpu.experts import ExpertRunner, Mixtures
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.models import find_model
from ringcast.executor.sharding import Sharding
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


def last_of(reports):
    return [report for report in reports if report is not None][-1]


def counts_of(reference) -> np.ndarray:
    return np.stack([mixture.loads_E for mixture in reference._model.mixtures().values()])


def test_counts_are_those_of_a_processor(pair):
    """Of one rank, in any kind of step, whatever it is padded to."""
    s = pair("qwen3 experts")
    s.enter(3, random_tokens(1, 9))
    reports = [s.run({3: 9}).experts]
    s.enter(2, random_tokens(5, 3))
    for step in ({3: 1, 2: 3}, {3: 1, 2: 1}, {3: 1}, {}):
        reports.append(s.run(step).experts)
    experts, want = last_of(reports), counts_of(s._reference)
    assert want.sum() == 3 * (9 + 4 + 2 + 1)
    assert experts.layers == [1]
    assert (np.frombuffer(experts.tokens, np.int64).reshape(1, 5) == want).all()
    assert experts.balancedness is None
    assert (experts.rounds, experts.moved) == (0, 0)


def test_warm_up_is_no_load(pair):
    s = pair("mixtral", against=False)
    assert not s.mine._decoder.mixtures.loads_LE.any()
    assert s.mine._batch.inputs[REPLICAS] == 0


def test_a_dense_model_has_nothing_to_report(pair):
    s = pair("llama", against=False)
    s.enter(1, random_tokens(1, 3))
    assert s.run({1: 3}).experts is None
    assert s.run({}).experts is None
    assert s.mine.notices() == []


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
    cpu, turn, counts = torch.device("cpu"), torch.zeros(1), torch.zeros(2)
    mixtures = Mixtures({}, Sharding(config, 0, 1), cpu)
    runner = ExpertRunner(config, 256, torch.float32, cpu, mixtures, turn, counts[:1])
    steps = runner.steps(256)
    assert DIRECT_TOKENS in steps
    plans = [runner._plan(tokens) for tokens in range(1, 257)]
    assert {plans[tokens - 1] for tokens in steps} == {*plans}
    assert steps[-1] == 256
    of_two = ExpertRunner(config, 128, torch.float32, cpu, mixtures, turn, counts)
    assert of_two.steps(128) == sorted({tokens // 2 for tokens in steps} - {0})
