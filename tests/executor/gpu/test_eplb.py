"""The load balancer of experts on devices: ranks and replicas as threads, with references of all
kernels, token by token against a CPU's runner that has all experts.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from executor.gpu.conftest import ReadsAtOnce, load, random_tokens
from executor.gpu.one_rank import Order, generate, run_ranks
from executor.gpu.one_replica import make_order, run_replicas
from executor.gpu.test_experts import counts_of, last_of
from executor.gpu.thread_ranks import threads
from executor.gpu.thread_replicas import replicas

from ringcast.executor import expert_balancer, expert_placement
from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu.batch import TURN
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.mq.errors import ConfigError

pytestmark = pytest.mark.interpreted  # test_eplb_on_device.py has devices

MODEL = "qwen3 experts of 4"
OFTEN = {"window_size": 4, "step_interval": 3}
__all__ = ["replicas", "threads"]  # fixtures


def balanced(**config) -> dict:
    return {"enable_eplb": True, "eplb_config": OFTEN | config}


def as_experts(runner, whole) -> None:
    """A rank has in each slot the weights of the expert that its placement says."""
    mine, all_of_them = runner._decoder.mixtures, whole._decoder.mixtures
    assert len(mine.weights) == len(all_of_them.weights) > 0
    for weights, routes, theirs in zip(mine.weights, mine.routes, all_of_them.weights, strict=True):
        held = routes.placement_RS[mine.rank].tolist()
        assert torch.equal(weights.gate_up_ENH, theirs.gate_up_ENH[held])
        assert torch.equal(weights.down_EHI, theirs.down_EHI[held])


def check_all(runners, whole, carriers, moves: bool) -> None:
    first, *others = (runner._decoder.mixtures for runner in runners)
    for other in others:
        assert torch.equal(first.loads_LE, other.loads_LE)
        for mine, theirs in zip(first.routes, other.routes, strict=True):
            assert (mine.placement_RS == theirs.placement_RS).all()
    for runner in runners:
        as_experts(runner, whole)
    balancers = [runner._experts._balancer for runner in runners]
    assert len({(each.rounds, each.moved) for each in balancers}) == 1
    assert balancers[0].rounds >= 2
    assert (balancers[0].moved > 0) == moves
    each = balancers[0]._experts.expert_bytes
    met = sum(carrier.carried - carriers_met(runners) for carrier in carriers)
    assert met == each * balancers[0].moved


def carriers_met(runners) -> int:
    """Bytes by which ranks have met all others."""
    shared = runners[0]._experts._balancer._experts._shared
    return (len(runners) - 1) * shared.nbytes


def alone(spec):
    return load(spec, GpuModelRunner, 0, torch.device("cpu"))


@pytest.mark.parametrize("redundant", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_ranks_have_the_tokens_of_one_while_experts_move(redundant, threads, specs, monkeypatch):
    """And pieces of one expert a step."""
    monkeypatch.setattr(expert_balancer, "BYTES_PER_STEP", 1)
    options = balanced(num_redundant_experts=redundant, log_balancedness=True)
    s = threads(MODEL, enable_expert_parallel=True, **options)
    one = s.mine.runners[0]
    assert one._decoder._layers[1].mlp.down_EHI.shape[0] == (4 + redundant) // 2
    whole = alone(specs[MODEL])
    reports = []
    for row, seed in ((3, 1), (0, 2)):
        s.enter(row, random_tokens(seed, 23))
        reports.append(s.run({3: 23} if row else {0: 23, 3: 1}).experts)
    for _ in range(30):
        reports.append(s.run({0: 1, 3: 1}).experts)
        for runner in s.mine.runners:
            as_experts(runner, whole)
    check_all(s.mine.runners, whole, s.mine.carriers, moves=True)
    assert one._batch.inputs[TURN].item() == 32
    reports.append(s.run({}).experts)
    assert s.run({}).experts is None  # all is said
    last = last_of(reports)
    assert last.layers == [1]
    want = counts_of(s._reference)
    assert want.sum() == 2 * (23 + 24 + 60)
    assert (np.frombuffer(last.tokens, np.int64).reshape(1, 4) == want).all()
    balancer = one._experts._balancer
    assert (last.rounds, last.moved) == (balancer.rounds, balancer.moved)
    assert 0 < last.most_seconds <= last.seconds
    assert 0 < last.balancedness <= 1
    notices = one.notices()
    assert len(notices) == 32
    assert notices[-1].startswith("experts: step 32, balancedness ")
    assert s.mine.runners[1].notices() == one.notices() == []


def test_replicas_have_the_tokens_that_each_has_alone_while_experts_move(
    replicas, specs, monkeypatch
):
    """Also one that has no tokens itself. The first speaks for both."""
    monkeypatch.setattr(expert_placement, "TOLERANCE", 0.0)
    r = replicas(**balanced(num_redundant_experts=2))
    a, b = r.hands
    a.enter(3, random_tokens(1, 30))
    r.run({3: 30}, {})
    b.enter(0, random_tokens(2, 7))
    r.run({}, {0: 7})
    reports = []
    for step in range(36):
        r.run({3: 1} if step % 3 else {}, {0: 1} if step % 4 else {})
        reports.append([output.experts for output in r.outputs])
    check_all(r.runners, alone(specs["mixtral"]), r.carriers, moves=True)
    for _ in range(2):
        r.run({}, {})
        reports.append([output.experts for output in r.outputs])
    assert not any(second for _, second in reports)
    assert reports[-1][0] is None
    last = last_of([first for first, _ in reports])
    want = sum(counts_of(hand._reference) for hand in r.hands)
    assert (np.frombuffer(last.tokens, np.int64).reshape(want.shape) == want).all()
    assert r.runners[0]._experts._balancer._window.steps == 2 + 36 - 3  # three had no tokens


def test_loads_of_a_window_are_read_without_waiting(threads):
    """A round's placement is what loads were when it began, however long hosts take to know."""
    s = threads(MODEL, enable_expert_parallel=True, **balanced(step_interval=8, window_size=8))
    balancer = s.mine.runners[0]._experts._balancer
    seen = []
    between = balancer._experts.loads_between

    def note(begin, end):
        loads = yield from between(begin, end)
        seen.append((balancer._window.steps, loads.sum()))
        return loads

    balancer._experts.loads_between = note
    s.enter(1, random_tokens(1, 5))
    s.run({1: 5})
    for _ in range(20):
        s.run({1: 1})
    delay = balancer._experts._delay
    assert delay == 3  # two steps in flight, and one more
    assert seen == [(9 + delay, 2 * (5 + 7)), (17 + delay, 2 * 8)]


@pytest.mark.slow
def test_ranks_as_processes_with_every_kernel(specs):
    """And weights that go through a group of torch's."""
    options = {"device": "cpu", "tensor_parallel_size": 2, "enable_expert_parallel": True}
    options |= {"max_num_seqs": 2} | balanced(num_redundant_experts=2)
    order = Order(specs[MODEL], options, [[5, 9, 4], [7, 3]], num_tokens=5)
    want = generate(ReadsAtOnce(load(specs[MODEL], CpuModelRunner)), order)
    answers = run_ranks(order, timeout=280)
    assert [answer.tokens for answer in answers] == [want, want]
    assert answers[0].moved == answers[1].moved > 0


@pytest.mark.slow
def test_replicas_as_processes_with_every_kernel(specs):
    options = {"device": "cpu"} | balanced(num_redundant_experts=2)
    order = make_order(specs["mixtral"], options, [[9], [3]], num_tokens=10)
    answers = run_replicas(order, timeout=280)
    for engine, answer in enumerate(answers):
        assert answer.tokens == order.alone(CpuModelRunner, engine)
    assert answers[0].moved == answers[1].moved > 0


def test_redundant_experts_must_be_dealt_evenly(specs):
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match="num_redundant_experts = 3: with 4 experts and 2 ranks"):
        load(
            specs[MODEL], GpuModelRunner, 0, torch.device("cpu"), **options,
            **balanced(num_redundant_experts=3),
        )  # fmt: skip


def test_what_is_kept_beside_is_of_one_layer(threads, specs):
    """And redundant experts count among the weights."""
    sizes = []
    for redundant in (0, 4):
        s = threads(MODEL, enable_expert_parallel=True, **balanced(num_redundant_experts=redundant))
        runner = s.mine.runners[0]
        sizes.append(runner.details()["weights_bytes"])
        experts = runner._experts._balancer._experts
        assert sum(each.nbytes for each in experts._staged) == (
            experts.expert_bytes * (4 + redundant) // 2
        )
    assert sizes[1] - sizes[0] == 2 * experts.expert_bytes
