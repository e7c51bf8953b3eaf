"""The numbers of several API servers, added up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringcast.frontend.metrics.recorder import Recorder
from ringcast.mq.tallies import Shape, Tallies


@pytest.fixture
def recorders() -> Iterator[list[Recorder]]:
    owner = Tallies.create(Shape(3))
    yield [Recorder(Tallies.attach(owner.fd, Shape(3), server)) for server in range(3)]
    owner.close()


def test_sums_are_over_all_that_have_flushed(recorders: list[Recorder]) -> None:
    first, second, third = recorders
    for number, recorder in enumerate(recorders, 1):
        recorder.finish("stop", number)
        recorder.first_token.observe(0.015 * number)
        recorder.max_tokens.observe(5)
    second.flush()
    seen = first.of_all()
    assert seen.finished == {"stop": 6, "length": 0, "abort": 0, "error": 0}
    buckets, total = seen.first_token.cumulative()
    assert dict(buckets)["0.01"] == 0
    assert dict(buckets)["0.02"] == 1
    assert dict(buckets)["+Inf"] == 2
    assert total == pytest.approx(0.045)
    third.flush()
    assert first.of_all().first_token.cumulative() == second.of_all().first_token.cumulative()
    assert third.of_all().max_tokens.cumulative()[1] == 15


def test_the_next_incarnation_counts_on(recorders: list[Recorder]) -> None:
    tallies = recorders[0]._tallies
    for number in (1, 2):
        recorder = Recorder(tallies)
        recorder.n.observe(1)
        recorder.finish("length")
        recorder.flush()
        assert recorder.n.cumulative() == (
            [(str(float(end)), number) for end in (1, 2, 5, 10, 20, 50, 100)] + [("+Inf", number)],
            number,
        )
    assert recorders[1].of_all().finished["length"] == 2


def test_no_number_is_anothers(recorders: list[Recorder]) -> None:
    recorder = recorders[2]
    for number, histogram in enumerate(recorder._histograms, 1):
        histogram.observe(1e9 * number)
    recorder.flush()
    for number, histogram in enumerate(recorders[0].of_all()._histograms, 1):
        buckets, total = histogram.cumulative()
        assert [count for _, count in buckets] == [0.0] * (len(buckets) - 1) + [1.0]
        assert total == 1e9 * number
