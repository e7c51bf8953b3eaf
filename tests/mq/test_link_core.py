"""A link's frames: in order or not at all, bounded, and given up after silence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcast.mq.errors import ChannelTimeout, CorruptRecordError
from ringcast.mq.handshake import Bye, PeersGone
from ringcast.mq.link_core import SILENT_TICKS, LinkCore, Record


def pair(window: int = 1000) -> tuple[LinkCore, LinkCore]:
    return LinkCore(7, "node a", window), LinkCore(7, "the master", window)


def test_records_and_messages_come_in_order():
    ours, theirs = pair()
    frames = ours.record("tokenizer.0", b"one")
    frames += ours.message(PeersGone(3, ["tokenizer.0"]))
    frames += ours.record("detokenizer.0", b"")
    heard = [theirs.heard(frame)[0] for frame in frames]
    assert heard == [
        Record("tokenizer.0", b"one"),
        PeersGone(3, ["tokenizer.0"]),
        Record("detokenizer.0", b""),
    ]


@pytest.mark.parametrize("which", ["twice", "lost"])
def test_a_frame_that_is_not_the_next_ends_the_link(which):
    ours, theirs = pair()
    first, second = ours.record("a", b"1"), ours.record("a", b"2")
    frames = first + first if which == "twice" else second
    for frame in frames[:-1]:
        theirs.heard(frame)
    with pytest.raises(CorruptRecordError, match="the master: frame"):
        theirs.heard(frames[-1])


def test_a_late_frame_of_an_older_link_is_not_taken_for_a_new_one():
    old = LinkCore(6, "node a").record("a", b"late")
    with pytest.raises(CorruptRecordError, match="of link 6 came where frame 0 of link 7"):
        pair()[1].heard(old[0])


@pytest.mark.parametrize("frame", [b"", b"\x01\x02", b"\x09" + b"\x07\0\0\0" + bytes(8)])
def test_what_is_no_frame_ends_the_link(frame):
    with pytest.raises(CorruptRecordError):
        pair()[0].heard(frame)


def test_what_exceeds_the_window_waits_until_the_other_side_has_handed_on():
    ours, theirs = pair(window=100)
    sent = [frame for n in range(10) for frame in ours.record("a", bytes(28) + bytes((n,)))]
    assert len(sent) == 3  # of 31 bytes
    assert ours.full
    assert not ours.message(Bye("x"))  # it doesn't overtake
    got = []
    while sent:
        heard, frames = theirs.heard(sent.pop(0))
        assert not frames
        got.append(heard)
        if isinstance(heard, Record):
            for beat in theirs.handed_on(heard):
                assert ours.under_way <= 100
                sent += ours.heard(beat)[1]
    assert [r.payload[-1] for r in got if isinstance(r, Record)] == list(range(10))
    assert got[-1] == Bye("x")
    assert not ours.full


def test_a_record_larger_than_the_window_goes_alone():
    ours, theirs = pair(window=100)
    (small,) = ours.record("a", b"small")
    assert not ours.record("a", bytes(1000))
    record = theirs.heard(small)[0]
    assert isinstance(record, Record)
    assert not theirs.handed_on(record)  # less than half a window: the next beat says it
    (beat,) = theirs.tick()
    (large,) = ours.heard(beat)[1]
    assert theirs.heard(large)[0] == Record("a", bytes(1000))


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(50, 200))
def test_whatever_is_put_in_arrives_and_memory_is_bounded(sizes, window):
    ours, theirs = pair(window)
    wire, got, held = [], [], []
    for size in sizes:
        wire += ours.record("a", bytes(size))
    while len(got) < len(sizes):
        for frame in wire:
            heard, _ = theirs.heard(frame)
            held.append(heard)
        assert sum(len(r.payload) + 2 for r in held) <= max(window, max(sizes) + 2)
        wire = []
        for record in held:
            got.append(len(record.payload))
            for beat in theirs.handed_on(record):
                wire += ours.heard(beat)[1]
        held = []
        if not wire and len(got) < len(sizes):
            for beat in theirs.tick():
                wire += ours.heard(beat)[1]
    assert got == sizes


def test_silence_is_counted_in_ticks_and_ends_the_link():
    ours, theirs = pair()
    for _ in range(3 * SILENT_TICKS):
        for beat in theirs.tick():
            ours.heard(beat)
        for beat in ours.tick():
            theirs.heard(beat)
    for _ in range(SILENT_TICKS - 1):  # the last beat of theirs came before our last tick
        ours.tick()
    with pytest.raises(ChannelTimeout, match="node a went silent: nothing heard for 5 s"):
        ours.tick()
