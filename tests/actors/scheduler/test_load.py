"""What a replica reports of its load, and when."""

import pytest
from no_model import SPEC

from ringcast.actors.core import PeerAdded, PeerLost
from ringcast.actors.scheduler.core import SchedulerCore
from ringcast.actors.scheduler.load import REPORT_SECONDS, LoadReports
from ringcast.mq import codec
from ringcast.mq.config import EngineConfig
from ringcast.mq.messages import AbortRequest, AddRequest, Load, OutputSpec
from ringcast.mq.sampling_params import SamplingParams


def test_only_changes_are_said():
    reports = LoadReports()
    reports.count(1, 2)
    assert reports.take(1, 1, 0.5, 1.0) == Load(1, 1, 0.5, [(1, 2)])
    assert reports.take(1, 1, 0.5, 2.0) is None
    assert reports.take(1, 1, 0.6, 3.0) == Load(1, 1, 0.6, [(1, 2)])


def test_not_too_often_but_the_end_at_once():
    reports = LoadReports()
    assert reports.take(1, 0, 0.0, 1.0) is not None
    assert reports.take(0, 1, 0.0, 1.0 + REPORT_SECONDS / 2) is None
    assert reports.take(0, 1, 0.0, 1.0 + REPORT_SECONDS) is not None
    assert reports.take(0, 0, 0.0, 1.0 + REPORT_SECONDS) == Load(0, 0, 0.0, [])


def test_who_has_nothing_is_not_mentioned():
    reports = LoadReports()
    reports.count(3, 1)
    reports.count(3, -1)
    assert reports.take(0, 0, 0.0, 1.0) == Load(0, 0, 0.0, [])


def test_a_new_coordinator_is_told_again():
    reports = LoadReports()
    load = reports.take(0, 0, 0.0, 1.0)
    reports.forget()
    assert reports.take(0, 0, 0.0, 1.0) == load


def loads(core, now):
    return [send for send in core.flush(now) if isinstance(send.message, Load)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_scheduler_reports_if_there_are_others(replicas):
    config = EngineConfig(device="fake", data_parallel_size=replicas)
    core = SchedulerCore(config, SPEC, name="scheduler.1")
    core.flush(0.0)
    params = SamplingParams(n=2, max_tokens=2)
    core.handle(
        "tokenizer.0", AddRequest("r", 0, codec.pack([1, 2]), params, OutputSpec(4), 0.0), 1.0
    )
    sent = loads(core, 1.0)
    if replicas == 1:
        assert sent == []
        return
    (send,) = sent
    assert send == ("coordinator.0", Load(2, 0, 0.0, [(4, 2)]))
    core.handle("coordinator.0", PeerLost(), 2.0)
    assert loads(core, 2.0) == sent
    core.handle("tokenizer.0", AbortRequest("r", 0), 3.0)
    assert loads(core, 3.0) == [("coordinator.0", Load(0, 0, 0.0, []))]


def test_a_coordinator_that_is_new_is_told_of_what_runs_already():
    core = SchedulerCore(EngineConfig(device="fake"), SPEC, has_coordinator=False)
    params = SamplingParams(n=2, max_tokens=2)
    core.handle(
        "tokenizer.0", AddRequest("r", 0, codec.pack([1, 2]), params, OutputSpec(4), 0.0), 1.0
    )
    core.handle("scheduler.1", PeerAdded(), 1.0)
    assert loads(core, 1.0) == []
    core.handle("coordinator.0", PeerAdded(), 2.0)
    assert loads(core, 2.0) == [("coordinator.0", Load(2, 0, 0.0, [(4, 2)]))]
