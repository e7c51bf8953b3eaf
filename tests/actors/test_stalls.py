"""Who hangs, by the positions of readers."""

from ringcast.actors.stalls import Position, Stall, StallWatch


def at(cursor, published, reader="worker.0", channel="scheduler.0>workers"):
    return Position(channel, reader, cursor, published)


def ticks(watch, positions, number):
    return [watch.tick(positions) for _ in range(number)]


def test_a_reader_that_does_not_move_is_named_within_the_limit():
    watch = StallWatch(10.0)
    assert watch.tick_seconds == 1.0
    *before, last = ticks(watch, [at(0, 64)], 10)
    assert before == [[]] * 9
    assert last == [Stall("scheduler.0>workers", "worker.0", 9.0)]


def test_a_short_limit_is_looked_at_more_often():
    watch = StallWatch(1.0)
    assert watch.tick_seconds == 0.25
    *before, last = ticks(watch, [at(0, 64)], 4)
    assert before == [[]] * 3
    assert last


def test_a_reader_that_moves_or_has_read_everything_does_not_hang():
    watch = StallWatch(2.0)
    assert not any(watch.tick([at(n, 1000)]) for n in range(20))
    assert not any(ticks(watch, [at(1000, 1000)], 20))


def test_every_channel_and_reader_counts_for_itself():
    watch = StallWatch(4.0)
    for n in range(3):
        watch.tick([at(0, 64), at(n, 64, "worker.1"), at(0, 64, "scheduler.0", "other")])
    stalls = watch.tick([at(0, 64), at(9, 64, "worker.1"), at(8, 64, "scheduler.0", "other")])
    assert [stall.reader for stall in stalls] == ["worker.0"]


def test_who_is_not_looked_at_begins_anew():
    watch = StallWatch(4.0)
    ticks(watch, [at(0, 64)], 3)
    watch.tick([])  # it is starting again
    assert not any(ticks(watch, [at(0, 64)], 3))
