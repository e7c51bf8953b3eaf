"""The launcher's table: every event in every phase."""

from __future__ import annotations

import pytest

from ringcast.frontend.launch.fleet import Ended, Fleet, Moved, NoRoom, Phase, Run, Timer


def launched(now=0.0) -> Fleet:
    fleet = Fleet({1: "a", 2: "b"})
    assert fleet.launch(now) == [Run(1), Run(2)]
    return fleet


def end(fleet: Fleet, now: float, status=1) -> Ended:
    """It ends, rests and runs again. Returns what the master hears."""
    ended, timer = fleet.ended(1, status, "said", now)
    assert isinstance(ended, Ended)
    assert timer == Timer(1, ended.seconds)
    assert fleet.phase(1) is Phase.RESTING
    assert fleet.timer(1, now + ended.seconds) == [Run(1)]
    assert fleet.phase(1) is Phase.RUNNING
    return ended


def test_who_ends_is_told_of_with_its_last_words_and_runs_again():
    fleet = launched()
    ended = end(fleet, 5.0)
    assert ended.error == "the headless host of rank 1 on a has ended with exit status 1:\nsaid"
    assert not ended.hopeless
    assert fleet.phase(2) is Phase.RUNNING


@pytest.mark.parametrize(("status", "hopeless"), [(0, False), (1, False), (-9, False), (2, True)])
def test_only_the_users_mistake_is_hopeless(status, hopeless):
    assert end(launched(), 5.0, status).hopeless is hopeless


def test_who_is_given_up_by_ray_is_hopeless_and_tried_all_the_same():
    fleet = launched()
    ended, timer = fleet.given_up(2, "no module named ringcast", 1.0)
    assert ended == Ended(2, "Ray can't start rank 2 on b: no module named ringcast", True, 1.0)
    assert timer == Timer(2, 1.0)
    assert fleet.timer(2, 2.0) == [Run(2)]


def test_it_rests_longer_each_time_until_it_has_run_for_long():
    fleet, now, rests = launched(), 0.0, []
    for _ in range(8):
        rests.append(end(fleet, now + 1.0).seconds)
        now += 1.0 + rests[-1]
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert end(fleet, now + 60.0).seconds == 1.0


def test_late_events_are_nothing():
    fleet = launched()
    assert fleet.timer(1, 1.0) == []  # it runs
    fleet.ended(1, 1, "", 1.0)
    assert fleet.ended(1, 1, "", 1.5) == []  # it rests
    assert fleet.given_up(1, "", 1.5) == []


def test_where_it_moves_is_told_once_and_named_from_then_on():
    fleet = launched()
    assert fleet.seen(1, "a", 1.0) == []
    assert fleet.seen(1, None, 2.0) == []
    assert fleet.seen(1, "c", 3.0) == [Moved(1, "c")]
    assert fleet.seen(1, "c", 4.0) == []
    assert "rank 1 on c has" in end(fleet, 5.0).error


def test_that_there_is_no_room_is_told_once_and_not_at_once():
    fleet = launched()
    assert fleet.seen(1, None, 10.0) == []
    assert fleet.seen(1, None, 14.9) == []
    assert fleet.seen(1, None, 15.0) == [NoRoom(1)]
    assert fleet.seen(1, None, 100.0) == []
    assert fleet.seen(1, "a", 101.0) == []  # the same node has come back
    assert fleet.seen(1, None, 102.0) == []
    assert fleet.seen(1, None, 107.0) == [NoRoom(1)]
