"""What one key may have: at a time, and in any minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ringcast.frontend.http.limits import WINDOW_SECONDS, KeyLimits
from ringcast.mq.tallies import Shape, Tallies


def limits_of(most: int | None, often: int | None) -> KeyLimits:
    return KeyLimits(Tallies.local(Shape(1, 3, often or 0)), most, often)


def test_nothing_is_limited_without_limits() -> None:
    limits = limits_of(None, None)
    assert [limits.enter(1, 0.0) for _ in range(1000)] == [None] * 1000


def test_a_place_is_free_when_one_leaves() -> None:
    limits = limits_of(1, None)
    assert limits.enter(1, 0.0) is None
    refusal = limits.enter(1, 0.0)
    assert refusal is not None
    assert refusal.retry_after == 1.0
    assert limits.enter(2, 0.0) is None
    limits.leave(1)
    assert limits.enter(1, 0.0) is None


@given(
    st.lists(st.floats(0.0, 40.0), max_size=60),
    st.integers(1, 5),
)
def test_no_minute_has_more_than_the_limit(gaps: list[float], most: int) -> None:
    """And whoever comes back when he was told to is let in."""
    limits, now, begun = limits_of(None, most), 0.0, []
    for gap in gaps:
        now += gap
        refusal = limits.enter(1, now)
        if refusal is not None:
            assert 0 < refusal.retry_after <= WINDOW_SECONDS
            now += refusal.retry_after + 1e-6
            assert limits.enter(1, now) is None
        begun.append(now)
    for i, first in enumerate(begun):
        assert sum(time < first + WINDOW_SECONDS for time in begun[i:]) <= most
