"""Master and nodes have each their part of one graph, and every edge between hosts has two ends."""

from __future__ import annotations

import pytest

from ringcast.actors import hosts, topology
from ringcast.mq.cluster_config import ClusterConfig, ClusterPlace
from ringcast.mq.config import EngineConfig, build

COUNTS = topology.counts_of(
    build(EngineConfig, {"device": "fake", "data_parallel_size": 4, "tensor_parallel_size": 2})
)


def part(ranks: range, headless: bool) -> hosts.Part:
    config = ClusterConfig(headless=headless)
    place = ClusterPlace(config=config, first=ranks.start, num=len(ranks), session="s")
    return hosts.part_of(hosts.node_counts(COUNTS) if headless else COUNTS, place)


MASTER, NODE = part(range(2, 4), False), part(range(2), True)


def test_a_host_alone_has_everything():
    whole = hosts.part_of(COUNTS, None)
    assert whole.instances == tuple(topology.instances(COUNTS))
    assert whole.units == topology.units(COUNTS)
    assert whole.channels == topology.channels(COUNTS)
    assert whole.clients == ("client.0",)
    assert not whole.targets
    assert not whole.remote


def test_every_actor_is_on_one_host_and_gateways_are_beside_them():
    here, there = set(MASTER.instances), set(NODE.instances)
    assert here | there == {*topology.instances(COUNTS), "gateway.0", "gateway.1"}
    assert here & there == {"scheduler.0", "scheduler.1"}  # on the master their gateways
    assert MASTER.clients == ("client.0",)
    assert NODE.clients == ("gateway.0", "gateway.1")


def test_a_gateway_plays_the_scheduler_on_the_master():
    assert MASTER.units["engine.0"] == ("scheduler.0",)
    assert MASTER.units["engine.3"] == ("worker.6", "worker.7", "scheduler.3")
    assert MASTER.remote == ("engine.0", "engine.1")
    assert "master_gateway" in MASTER.target("scheduler.0")
    assert MASTER.target("scheduler.3") == topology.target("scheduler")


def test_a_master_may_have_no_replica_at_all():
    master = part(range(0), False)
    assert not [name for name in master.instances if name.startswith("worker.")]
    assert master.remote == tuple(f"engine.{rank}" for rank in range(4))
    assert {"tokenizer.0", "detokenizer.0", "coordinator.0", "client.0"} <= set(master.instances)


def test_a_nodes_engine_has_its_gateway_in_its_unit_and_nothing_else_is_there():
    assert NODE.units == {
        "engine.0": ("worker.0", "worker.1", "scheduler.0", "gateway.0"),
        "engine.1": ("worker.2", "worker.3", "scheduler.1", "gateway.1"),
    }
    assert not NODE.remote
    assert "node_gateway" in NODE.target("gateway.1")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_crosses_has_the_same_name_on_both_hosts_and_ends_at_gateways(rank):
    scheduler, gateway = f"scheduler.{rank}", f"gateway.{rank}"
    on_master = {c.name: c for c in MASTER.channels if scheduler in (c.writer, *c.readers)}
    on_node = {c.name: c for c in NODE.channels if gateway in (c.writer, *c.readers)}
    assert on_master.keys() == on_node.keys()
    assert f"tokenizer.0>{scheduler}" in on_node
    assert f"{scheduler}>detokenizer.0" in on_node
    assert f"{scheduler}>coordinator.0" in on_node
    for channel in on_node.values():
        assert {channel.writer, *channel.readers} == {scheduler, gateway}


def test_what_stays_within_an_engine_is_on_its_host_alone():
    names = [channel.name for channel in MASTER.channels]
    assert "scheduler.2>workers" in names
    assert not any("worker.0" in name or "scheduler.0>workers" in name for name in names)
    inner = [c for c in NODE.channels if "gateway" not in "".join((c.writer, *c.readers))]
    assert {c.name for c in inner} == {
        *("scheduler.0>workers", "scheduler.1>workers"),
        *(f"worker.{w}>scheduler.{w // 2}" for w in range(4)),
    }
