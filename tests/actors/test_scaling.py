"""Which scales can be at all, and what they add."""

from __future__ import annotations

import pytest

from ringcast.actors import scaling
from ringcast.actors.scaling import Scaling, new_units, scaled
from ringcast.actors.topology import counts_for
from ringcast.mq.config import EngineConfig
from ringcast.mq.supervision import Scaled


def test_new_replicas_have_as_many_ranks_and_several_have_a_coordinator() -> None:
    counts = counts_for(1, 2)
    assert new_units(counts, 2) == {
        "engine.1": ("worker.2", "worker.3", "scheduler.1"),
        "coordinator.0": ("coordinator.0",),
    }
    assert new_units(counts_for(2, 1), 3) == {"engine.2": ("worker.2", "scheduler.2")}
    assert new_units(counts_for(2, 1), 1) == {}
    assert scaled(counts_for(2, 1), 1) == {"worker": 1, "scheduler": 1, "coordinator": 1}


@pytest.mark.parametrize("replicas", [-1, 0, 65])
def test_how_many_there_can_be(replicas: int) -> None:
    refusal = Scaling(EngineConfig(device="fake"), is_cluster=False).refusal(replicas)
    assert refusal == f"replicas = {replicas}: must be 1 to 64"


def test_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "num_cuda_devices", lambda: 4)
    engine = EngineConfig(device="cuda", tensor_parallel_size=2)
    assert Scaling(engine, is_cluster=False).refusal(2) == ""
    assert "6 CUDA devices, and there are 4" in Scaling(engine, is_cluster=False).refusal(3)
    staged = EngineConfig(device="cuda", tensor_parallel_size=2, pipeline_parallel_size=2)
    assert "8 CUDA devices, and there are 4" in Scaling(staged, is_cluster=False).refusal(2)


def test_several_hosts_and_fixed_ranks_are_refused() -> None:
    assert "several hosts" in Scaling(EngineConfig(device="fake"), is_cluster=True).refusal(2)
    experts = EngineConfig(device="cpu", enable_expert_parallel=True)
    assert "enable_expert_parallel" in Scaling(experts, is_cluster=False).refusal(2)


def test_who_has_asked_is_answered_once() -> None:
    scales = Scaling(EngineConfig(device="fake"), is_cluster=False)
    scales.begin("client.1", 7)
    assert scales.end(2, "") == [("client.1", Scaled(7, 2))]
    scales.begin("client.0", 8)
    assert scales.end(2, "no room") == [("client.0", Scaled(8, 2, "no room", 500))]
    assert scales.end(2, "no room") == []
