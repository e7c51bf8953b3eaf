"""Master and nodes have each their part of one graph, and every edge between hosts has two ends."""

from __future__ import annotations

import pytest

from ringcast.actors import hosts, topology
from ringcast.mq.cluster_config import ClusterConfig, ClusterPlace
from ringcast.mq.config import EngineConfig, build

COUNTS = topology.counts_of(
    build(EngineConfig, {"device": "fake", "data_parallel_size": 4, "tensor_parallel_size": 2})
)


def part(ranks: range, headless: bool, counts=COUNTS) -> hosts.Part:
    config = ClusterConfig(headless=headless)
    place = ClusterPlace(config=config, first=ranks.start, num=len(ranks), session="s")
    return hosts.part_of(hosts.counts_on(counts, place), place)


MASTER, NODE = part(range(2, 4), False), part(range(2), True)
IN_STEP = {**COUNTS, topology.LOCKSTEP: 1}


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
    assert MASTER.remote == ("scheduler.0", "scheduler.1")
    assert "master_gateway" in MASTER.target("scheduler.0")
    assert MASTER.target("scheduler.3") == topology.target("scheduler")


def test_a_master_may_have_no_replica_at_all():
    master = part(range(0), False)
    assert not [name for name in master.instances if name.startswith("worker.")]
    assert master.remote == tuple(f"scheduler.{rank}" for rank in range(4))
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


def test_replicas_that_step_together_are_one_unit_on_each_host_with_its_mirror():
    master, node = part(range(2, 4), False, IN_STEP), part(range(2), True, IN_STEP)
    assert set(master.units["engine.0"]) == {
        *("worker.4", "worker.5", "worker.6", "worker.7", "mirror.2"),
        *(f"scheduler.{i}" for i in range(4)),
    }
    assert master.remote == ("mirror.2", "scheduler.0", "scheduler.1")
    assert node.units == {
        "engine.0": (
            *("worker.0", "worker.1", "worker.2", "worker.3", "mirror.0"),
            *("scheduler.0", "scheduler.1", "gateway.0", "gateway.1"),
        )
    }
    assert node.remote == ("mirror.0",)
    assert node.patient
    assert not any(part.patient for part in (master, MASTER, NODE))
    counts = {**IN_STEP, "mirror": 4}
    assert {topology.group_of(f"{name}.3", counts) for name in ("scheduler", "mirror")} == {0}


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_said_of_waves_crosses_like_all_else(rank):
    master, node = part(range(2, 4), False, IN_STEP), part(range(2), True, IN_STEP)
    for name in (f"scheduler.{rank}>coordinator.0", f"coordinator.0>scheduler.{rank}"):
        (there,) = (channel for channel in master.channels if channel.name == name)
        (here,) = (channel for channel in node.channels if channel.name == name)
        assert {there.writer, *there.readers} == {f"scheduler.{rank}", "coordinator.0"}
        assert {here.writer, *here.readers} == {f"scheduler.{rank}", f"gateway.{rank}"}


def test_a_host_alone_needs_no_mirror():
    assert hosts.counts_on(IN_STEP, None) == IN_STEP
    assert not any(name.startswith("mirror.") for name in topology.instances(IN_STEP))


def test_only_a_masters_lives_have_sessions_of_their_own():
    places = [
        ClusterPlace(config=ClusterConfig(headless=headless), first=0, num=1, session="s")
        for headless in (False, True)
    ]
    assert places[0].next_session().session not in ("s", places[0].next_session().session)
    assert places[1].next_session() is places[1]


def test_text_actors_are_all_on_the_master_and_have_their_edges_on_both_hosts():
    counts = {**COUNTS, "tokenizer": 2, "detokenizer": 2}
    master, node = (
        hosts.part_of(hosts.counts_on(counts, place), place)
        for place in (
            ClusterPlace(config=ClusterConfig(headless=headless), first=first, num=2, session="s")
            for headless, first in ((False, 2), (True, 0))
        )
    )
    text = {"tokenizer.0", "tokenizer.1", "detokenizer.0", "detokenizer.1"}
    assert text <= set(master.instances)
    assert not text & set(node.instances)
    for edge in ("tokenizer.1>scheduler.0", "scheduler.0>detokenizer.1"):
        assert all(edge in {c.name for c in part.channels} for part in (master, node))


# One engine on three hosts: two stages of three ranks


SHARED = topology.counts_of(
    build(EngineConfig, {"device": "fake", "tensor_parallel_size": 3, "pipeline_parallel_size": 2})
)


def part_of_node(node: int, nnodes: int = 3) -> hosts.Part:
    config = ClusterConfig(headless=node > 0, nnodes=nnodes, node_rank=node)
    place = ClusterPlace(config=config, first=0, num=1, session="s")
    return hosts.part_of(hosts.counts_on(SHARED, place), place)


NODES = [part_of_node(node) for node in range(3)]


def test_workers_are_dealt_to_nodes_in_order():
    workers = [[name for name in node.instances if name.startswith("worker.")] for node in NODES]
    assert workers == [[f"worker.{w}" for w in (2 * n, 2 * n + 1)] for n in range(3)]
    assert set(topology.instances(SHARED)) < {name for node in NODES for name in node.instances}
    assert NODES[0].clients == ("client.0",)
    assert NODES[2].clients == ("gateway.2",)
    assert NODES[2].instances == ("worker.4", "worker.5", "gateway.2")


def test_the_master_has_a_gateway_for_each_node_in_its_unit():
    parts = ("worker.0", "worker.1", "scheduler.0", "gateway.1", "gateway.2")
    assert NODES[0].units["engine.0"] == parts
    assert NODES[1].units == {"engine.0": ("worker.2", "worker.3", "gateway.1")}
    assert NODES[0].remote == ("gateway.1", "gateway.2")
    assert NODES[2].remote == ("gateway.2",)
    assert [node.patient for node in NODES] == [False, True, True]
    assert "RanksMaster" in NODES[0].target("gateway.2")
    assert "RanksNode" in NODES[2].target("gateway.2")


@pytest.mark.parametrize("node", [1, 2])
def test_plans_and_answers_of_a_nodes_workers_go_through_its_gateway(node):
    gateway = f"gateway.{node}"
    channels = {c.name: c for c in NODES[node].channels}
    own = [f"worker.{w}" for w in (2 * node, 2 * node + 1)]
    assert set(channels) == {"scheduler.0>workers", *(f"{w}>scheduler.0" for w in own)}
    plans = channels["scheduler.0>workers"]
    assert (plans.writer, plans.readers) == (gateway, tuple(own))
    on_master = {c.name: c for c in NODES[0].channels if gateway in (c.writer, *c.readers)}
    assert on_master.keys() == channels.keys()
    for worker in own:
        assert channels[f"{worker}>scheduler.0"].readers == (gateway,)
        answers = on_master[f"{worker}>scheduler.0"]
        assert (answers.writer, answers.readers) == (gateway, ("scheduler.0",))
    plans = on_master["scheduler.0>workers"]
    assert plans.readers == ("worker.0", "worker.1", "gateway.1", "gateway.2")
    assert plans.writer == "scheduler.0"
