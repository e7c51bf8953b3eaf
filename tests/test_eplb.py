"""The load balancer of experts: the same tokens as one engine, while experts move from rank to rank
between its steps; and what is counted meanwhile."""

from __future__ import annotations

import time

import numpy as np
import pytest
from in_process import InProcessEngine, Together
from random_models import GREEDY, SMALL, assert_same, make_model, prompts, run_greedy
from ranks import Ranks

from ringcast.executor.expert_reports import REPORT_SECONDS
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.messages import Ping

DEALT = {"enable_expert_parallel": True, "enable_eplb": True}
OFTEN = {"window_size": 5, "step_interval": 3}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3 experts")


@pytest.fixture(scope="module")
def one(spec):
    engine = InProcessEngine(build(EngineConfig, SMALL), spec)
    return engine, run_greedy(engine, prompts())


def run(spec, ranks, sizes, **eplb):
    """The engines of an engine of so many ranks, and their tokens."""
    config = build(EngineConfig, {**SMALL, **DEALT, **sizes, "eplb_config": {**OFTEN, **eplb}})
    runner = ranks.load(config, spec)
    if not config.lockstep:
        engine = InProcessEngine(config, spec, runner)
        tokens = run_greedy(engine, prompts())
        time.sleep(REPORT_SECONDS)  # then a step reports all that came before
        engine.add("last", [1], GREEDY)
        engine.run()
        return [engine], tokens
    replicas = Together(config, spec, runner)
    engines = replicas.engines
    for i, prompt in enumerate(prompts()):
        engines[i % 2].add(f"greedy {i}", prompt, GREEDY)
    replicas.run()
    return engines, [engines[i % 2].tokens[f"greedy {i}"][0] for i in range(len(prompts()))]


def check_tokens(spec, ranks, one, sizes, redundant, moves=True):
    """They are the same over several rounds, in which experts move."""
    engines, got = run(spec, ranks, sizes, num_redundant_experts=redundant)
    assert_same(one[0], got, one[1])
    first, *others = (engine.scheduler.statistics() for engine in engines)
    assert first["eplb_rounds"] > 1
    assert bool(first["eplb_moved_experts"]) == moves
    assert 0 < first["eplb_most_seconds"] <= first["eplb_seconds"]
    assert 0 < first["expert_balancedness"] <= 1
    assert not any("expert_tokens" in other for other in others)  # the first one speaks for all
    for engine in engines:
        engine.scheduler.check()


@pytest.mark.parametrize("redundant", [pytest.param(0, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "option",
    [pytest.param("tensor_parallel_size", marks=pytest.mark.slow), "data_parallel_size"],
)
def test_the_same_tokens(spec, ranks, one, option, redundant):
    check_tokens(spec, ranks, one, {option: 2}, redundant)


@pytest.mark.slow
def test_every_rank_has_every_expert(spec, ranks, one):
    check_tokens(spec, ranks, one, {"tensor_parallel_size": 2}, 8, moves=False)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "data", "redundant"), [(4, 1, 8), (2, 2, 4)])
def test_the_same_tokens_of_four(spec, ranks, one, tensor, data, redundant):
    sizes = {"tensor_parallel_size": tensor, "data_parallel_size": data}
    check_tokens(spec, ranks, one, sizes, redundant)


@pytest.mark.parametrize("size", [1, 2])
def test_tokens_are_counted(spec, ranks, one, size):
    """With and without ranks; by each expert, in each layer that has some."""
    options = {"tensor_parallel_size": size, "enable_expert_parallel": size > 1}
    config = build(EngineConfig, {**SMALL, **options})
    engine = one[0] if size == 1 else InProcessEngine(config, spec, ranks.load(config, spec))
    if size > 1:
        run_greedy(engine, prompts())
    engine.scheduler.handle("tokenizer.0", Ping(0, 1), 0.0)  # what isn't said yet comes with it
    engine.step()
    said, heard = engine.scheduler.statistics(), engine.scheduler._experts.last
    assert heard.layers == [0, 2]
    tokens = np.frombuffer(heard.tokens, np.int64).reshape(2, 8)
    assert (tokens.sum(1) == 3 * said["scheduled_tokens"]).all()
    assert said["expert_tokens"] == tokens.sum()
    skews = tokens.max(1) / tokens.mean(1)
    assert said["expert_skew"] == pytest.approx(skews.mean())
    assert said["hottest_layer"] == [0, 2][skews.argmax()]
    assert said["hottest_expert"] == tokens[skews.argmax()].argmax()
    assert ("expert_balancedness" in said) == (size > 1)
    assert said["eplb_rounds"] == 0
