"""A histogram's buckets are those that Prometheus' definition gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcast.frontend.metrics.histogram import Histogram


@given(st.lists(st.floats(0, 20) | st.sampled_from([1.0, 2.5, 10.0])))
def test_each_bucket_counts_what_is_at_most_its_end(values: list[float]) -> None:
    histogram = Histogram([1, 2.5, 10])
    for number, value in enumerate(values):
        histogram.observe(value)
        if number % 7 == 3:
            histogram.cumulative()
    buckets, total = histogram.cumulative()
    assert [end for end, _ in buckets] == ["1.0", "2.5", "10.0", "+Inf"]
    for end, count in buckets:
        assert count == sum(value <= float(end) for value in values)
    assert total == pytest.approx(sum(values))


def test_it_gathers_no_more_than_it_must() -> None:
    histogram = Histogram([1])
    for _ in range(20_000):
        histogram.observe(0.5)
        assert len(histogram._waiting) < 10_000
    assert histogram.cumulative() == ([("1.0", 20_000.0), ("+Inf", 20_000.0)], 10_000.0)
