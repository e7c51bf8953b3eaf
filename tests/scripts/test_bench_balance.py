"""The balance benchmark's model of replicas: nothing is lost, and what is counted is right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import bench_balance

        yield bench_balance
    for name in ("bench_balance", "figures"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("policy", ["score", "prefix"])
def test_every_request_is_somewhere_and_loads_are_even(bench, policy):
    simulation = bench.Simulation(4, 2, policy, 0.1, seed=3)
    outcome = simulation.run(8.0, rate=4.0)
    assert len(outcome.ttfts) > 20
    assert min(outcome.ttfts) >= bench.OWN / bench.PREFILL - 1e-9
    assert 1.0 <= outcome.ratio < 2.0
    assert 0.0 < outcome.hits < 1.0
    counted = sum(router._own.sum() for router in simulation.routers)
    assert counted == sum(replica.load for replica in simulation.replicas)
    for replica in simulation.replicas:
        assert sum(replica.clients.values()) == replica.load


def test_a_run_follows_from_its_seed(bench):
    def ratio(seed):
        return bench.Simulation(3, 2, "score", 0.1, seed).run(6.0, rate=4.0).ratio

    assert ratio(1) == ratio(1) != ratio(2)


def test_the_coordinators_cost_is_measured(bench):
    report, publication = bench.coordinator_cost(4, 2, rounds=2)
    assert 0 < report < 0.1
    assert 0 < publication < 0.1
