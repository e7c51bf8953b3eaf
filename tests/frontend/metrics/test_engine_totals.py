"""What several schedulers have published, each for itself and together."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from ringcast.frontend.metrics.engine_totals import EngineTotals
from ringcast.frontend.metrics.exposition import render
from ringcast.frontend.metrics.recorder import Recorder
from ringcast.mq.supervision import Status

STATUS = Status(
    [],
    [],
    {
        "scheduler.10.running": 1.0,
        "scheduler.2.running": 4.0,
        "scheduler.2.kv_usage": 0.5,
        "scheduler.10.kv_usage": 0.25,
        "scheduler.2.steps_le_8": 3.0,
        "scheduler.2.steps_le_inf": 1.0,
        "scheduler.2.scheduled_tokens": 50.0,
        "worker.0.running": 9.0,
    },
)


def test_of_each_and_of_all():
    totals = EngineTotals(STATUS)
    assert totals.engines == ["2", "10"]
    assert totals.of("running") == {"2": 4.0, "10": 1.0}
    assert totals.total("running") == 5.0
    assert totals.mean("kv_usage") == 0.375
    assert totals.total("steps") is None
    assert totals.step_sizes("2") == ([("8.0", 3.0), ("+Inf", 4.0)], 50.0)
    assert totals.step_sizes("10") is None


def samples_of(status, name):
    text, _ = render(status, Recorder(), "m", None)
    return [
        sample
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    ]


def test_experts_are_those_of_mixtures():
    values = {"scheduler.0.expert_tokens": 90.0, "scheduler.0.expert_balancedness": 0.5}
    mixture = Status([], [], values)
    assert samples_of(mixture, "ringcast:expert_tokens_total")[0].value == 90.0
    (even,) = samples_of(mixture, "ringcast:expert_balancedness")
    assert (even.labels, even.value) == ({"model_name": "m", "engine": "0"}, 0.5)
    assert not samples_of(mixture, "ringcast:eplb_rounds_total")
    assert b"expert" not in render(STATUS, Recorder(), "m", None)[0]


def test_every_replica_has_its_samples():
    samples = samples_of(STATUS, "ringcast:num_requests_running")
    assert [(sample.labels, sample.value) for sample in samples] == [
        ({"model_name": "m", "engine": "2"}, 4.0),
        ({"model_name": "m", "engine": "10"}, 1.0),
    ]
