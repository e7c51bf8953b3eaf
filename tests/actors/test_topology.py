"""Who belongs to which replica, and who talks to whom."""

import pytest

from ringcast.actors import topology
from ringcast.mq.config import EngineConfig

TWO_OF_TWO = topology.counts_of(EngineConfig(tensor_parallel_size=2, data_parallel_size=2))


def test_one_replica_is_as_if_there_were_none():
    counts = topology.counts_of(EngineConfig())
    assert topology.instances(counts) == topology.instances({})
    assert topology.channels(counts) == topology.channels({})
    assert "coordinator.0" not in topology.instances(counts)


def test_a_replica_is_a_scheduler_and_its_workers():
    units = topology.units(TWO_OF_TWO)
    assert units["engine.0"] == ("worker.0", "worker.1", "scheduler.0")
    assert units["engine.1"] == ("worker.2", "worker.3", "scheduler.1")
    alone = ("client.0", "tokenizer.0", "detokenizer.0", "coordinator.0")
    assert all(units[name] == (name,) for name in alone)
    assert len(units) == 2 + len(alone)


def test_every_stage_has_its_workers():
    counts = topology.counts_of(
        EngineConfig(
            device="fake",
            tensor_parallel_size=2,
            pipeline_parallel_size=3,
            data_parallel_size=2,
        )
    )
    assert counts["worker"] == 12
    units = topology.units(counts)
    assert units["engine.1"] == (*(f"worker.{i}" for i in range(6, 12)), "scheduler.1")
    assert topology.rank_of("worker.11", counts) == 5


@pytest.mark.parametrize(("worker", "engine", "rank"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)])
def test_workers_are_numbered_replica_by_replica(worker, engine, rank):
    assert topology.engine_of(f"worker.{worker}", TWO_OF_TWO) == engine
    assert topology.rank_of(f"worker.{worker}", TWO_OF_TWO) == rank
    assert topology.ranks_per_engine(TWO_OF_TWO) == 2


def test_who_serves_all_is_of_no_replica():
    for name in ("client.0", "tokenizer.0", "detokenizer.0", "coordinator.0"):
        assert topology.engine_of(name, TWO_OF_TWO) is None


def test_plans_and_outputs_stay_within_a_replica():
    channels = topology.channels(TWO_OF_TWO)
    assert len({channel.name for channel in channels}) == len(channels)
    plans = {c.writer: c.readers for c in channels if c.name.endswith(">workers")}
    assert plans == {
        "scheduler.0": ("worker.0", "worker.1"),
        "scheduler.1": ("worker.2", "worker.3"),
    }
    outputs = {c.writer: c.readers for c in channels if c.writer.startswith("worker.")}
    assert outputs == {f"worker.{i}": (f"scheduler.{i // 2}",) for i in range(4)}


def test_everybody_else_talks_to_every_replica():
    names = {channel.name for channel in topology.channels(TWO_OF_TWO)}
    for number in range(2):
        scheduler = f"scheduler.{number}"
        for other in ("tokenizer.0", "detokenizer.0"):
            assert f"{other}>{scheduler}" in names
        for other in ("detokenizer.0", "coordinator.0"):
            assert f"{scheduler}>{other}" in names
    assert "coordinator.0>client.0" in names


def test_replicas_that_step_together_are_one_unit():
    engine = EngineConfig(device="fake", data_parallel_size=2, enable_expert_parallel=True)
    counts = topology.counts_of(engine)
    units = topology.units(counts)
    together = ("worker.0", "worker.1", "scheduler.0", "scheduler.1")
    assert {name for name, actors in units.items() if set(actors) & set(together)} == {"engine.0"}
    assert units["engine.0"] == together
    started = {c.name for c in topology.channels(counts) if c.writer == "coordinator.0"}
    assert {"coordinator.0>scheduler.0", "coordinator.0>scheduler.1"} < started
    apart = topology.counts_of(EngineConfig(device="fake", data_parallel_size=2))
    assert not [c for c in topology.channels(apart) if c.name == "coordinator.0>scheduler.0"]


def test_text_actors_are_units_of_their_own_and_talk_to_all():
    engine = EngineConfig(
        device="fake", tokenizer_count=2, detokenizer_count=3, data_parallel_size=2
    )
    counts = topology.counts_of(engine)
    units = topology.units(counts)
    text = [f"tokenizer.{i}" for i in range(2)] + [f"detokenizer.{i}" for i in range(3)]
    assert all(units[name] == (name,) for name in text)
    names = {channel.name for channel in topology.channels(counts)}
    for name in text:
        assert f"{name}>client.0" in names
        assert {f"{name}>scheduler.{i}" for i in range(2)} <= names
    assert {f"scheduler.{e}>detokenizer.{d}" for e in range(2) for d in range(3)} <= names
    assert {"client.0>tokenizer.0", "client.0>tokenizer.1"} <= names
