"""Experts that move while two ranks or replicas serve: each on a device of its own, or both on one
where there is only one. In graphs and eagerly, the tokens of one that has all experts. And an
engine through its front door, on two devices.
"""

from __future__ import annotations

import pytest
from executor.gpu.conftest import load, make_model
from executor.gpu.one_rank import Order, generate, run_ranks
from executor.gpu.one_replica import make_order, run_replicas
from executor.gpu.test_lockstep_on_device import LENGTHS, LIMIT, llm, tokens_of
from executor.gpu.test_lockstep_on_device import OPTIONS as ALONE
from executor.gpu.test_parallel_on_device import PROMPTS
from kernels.gpu.devices import DEVICE

from ringcast.executor.gpu.runner import GpuModelRunner

pytestmark = pytest.mark.gpu
BALANCED = {
    "enable_eplb": True,
    "eplb_config": {"window_size": 4, "step_interval": 3, "num_redundant_experts": 2},
}
DEALT = {"enable_expert_parallel": True, **BALANCED}


def check(answers, want) -> None:
    assert [answer.compiled for answer in answers] == [[], []]
    assert answers[0].moved == answers[1].moved > 0
    for answer, theirs in zip(answers, want, strict=True):
        same = sum(a == b for a, b in zip(answer.tokens, theirs, strict=True))
        assert same >= len(theirs) - 1, (answer.tokens, theirs)  # one may part at a tie


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3 experts of 4"])
def test_ranks_have_the_tokens_of_one_while_experts_move(name, eager, specs):
    options = ALONE | {"enforce_eager": eager}
    more = {"tensor_parallel_size": 2, **DEALT}
    order = Order(specs[name], options | more, PROMPTS, num_tokens=30, any_params=True)
    want = generate(load(order.spec, GpuModelRunner, 0, DEVICE, **options), order)
    answers = run_ranks(order, LIMIT)
    assert answers[0].tokens == answers[1].tokens
    check(answers, [want, want])


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_replicas_have_the_tokens_that_each_has_alone_while_experts_move(eager, specs):
    options = ALONE | BALANCED | {"enforce_eager": eager}
    order = make_order(specs["mixtral"], options, LENGTHS, num_tokens=40)
    answers = run_replicas(order, LIMIT)
    device = {"device": "cuda", "enforce_eager": eager}
    check(answers, [order.alone(GpuModelRunner, engine, **device) for engine in range(2)])


@pytest.mark.two_devices
@pytest.mark.parametrize(
    "shares", [{"data_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["dp", "tp"]
)
def test_an_engine_whose_experts_move(shares, tmp_path):
    """The texts of one device, again and again."""
    sizes = {"max_position_embeddings": 512, "vocab_size": 512, "hidden_size": 64}
    make_model(tmp_path / "model", "mixtral", **sizes)
    folder = str(tmp_path / "model")
    with llm(folder) as one:
        want = tokens_of(one, 60)
    with llm(folder, **DEALT, **shares) as two:
        for _ in range(3):
            got = tokens_of(two, 60)
            assert sum(a == b for a, b in zip(got, want, strict=True)) >= len(want) - 1
