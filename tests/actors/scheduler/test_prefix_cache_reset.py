"""ResetPrefixCache through the scheduler's core: in order, at once, and with requests under way."""

import sys

import pytest

from ringcast.mq import messages
from ringcast.mq.errors import ConfigError

RESET = messages.ResetPrefixCache(3, "reset-1")


@pytest.fixture
def engine(make_engine):
    return make_engine(num_gpu_blocks_override=100)


def test_what_comes_after_finds_nothing_of_before(engine):
    engine.add("a", range(40))
    engine.run()
    engine.add("b", range(40))
    engine.run()
    assert engine.cached("b") == 36
    engine.handle(RESET)
    engine.add("c", range(40))
    engine.run()
    assert engine.cached("c") == 0
    assert engine.resets == [RESET]
    engine.add("d", range(40))
    engine.run()
    assert engine.cached("d") == 36
    statistics = engine.core.statistics()
    assert statistics["prefix_cache_queries"] == 160
    assert statistics["prefix_cache_hits"] == 72
    engine.assert_idle()


def test_it_is_answered_at_once_even_before_the_workers_are_ready(make_engine):
    engine = make_engine(ready=False)
    engine.handle(RESET)
    engine.flush()
    assert engine.resets == [RESET]


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("steps", range(1, 9))
def test_requests_that_run_go_on_and_leave_nothing_to_be_found(make_engine, steps, ahead):
    engine = make_engine(
        num_gpu_blocks_override=100, max_num_batched_tokens=8, max_steps_in_flight=ahead
    )
    engine.add("a", range(30), n=2, max_tokens=20)
    for _ in range(steps):
        engine.step()
    engine.handle(RESET)
    engine.run()
    for choice in range(2):
        assert engine.output("a", choice) == engine.expected("a", choice, num_tokens=20)
    engine.add("b", range(30))
    engine.run()
    assert engine.cached("b") == 0
    engine.assert_idle()


def test_the_hash_algorithm_is_an_option(make_engine, monkeypatch):
    engine = make_engine(prefix_caching_hash_algo="sha256")
    engine.add("a", range(9))
    engine.flush()
    (request,) = engine.core._requests.values()
    assert [len(one) for one in request.hashes] == [32, 32]
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match="prefix_caching_hash_algo = 'xxh3_128' needs"):
        make_engine(prefix_caching_hash_algo="xxh3_128")
