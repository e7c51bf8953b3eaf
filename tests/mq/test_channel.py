"""The conformance suite: every rule of the contract (mq/channel.py), for every transport."""

from __future__ import annotations

import os
import random
import re
import select
import threading
import time

import pytest

from ringcast.mq import zmq_channel
from ringcast.mq.errors import ChannelClosed, ChannelTimeout, PeerDeadError

CAPACITY = 4096
SOON = 10.0  # seconds: far more than anything here takes


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def fill(sender, payload=bytes(100)):
    """Send until the channel is full. Returns how many records it took."""
    count = 0
    while sender.try_send(payload):
        count += 1
    return count


def rung(end, timeout=0.0):
    poller = select.poll()
    poller.register(end.fileno(), select.POLLIN)
    return bool(poller.poll(timeout * 1000))


def carry(sender, receivers, payloads):
    """Send everything and receive it everywhere, all in this thread. Returns what each received."""
    left, got = list(payloads), [[] for _ in receivers]
    deadline = time.monotonic() + SOON
    while left or any(len(records) < len(payloads) for records in got):
        assert time.monotonic() < deadline
        while left and sender.try_send(left[0]):
            left.pop(0)
        for receiver, records in zip(receivers, got, strict=True):
            while (record := receiver.try_receive()) is not None:
                records.append(record)
            receiver.commit()
    return got


# Rule 1: whole, once, in order, any size.


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 15, 16, 17, 1000, CAPACITY - 16, CAPACITY - 15, CAPACITY, 5 * CAPACITY + 3]
)
def test_any_size_arrives_whole(channel, size):
    made = channel(capacity=CAPACITY)
    sender, receiver = made.sender(), made.receiver()
    records = [content(size), b"after", content(size)]
    assert carry(sender, [receiver], records) == [records]


@pytest.mark.parametrize("num_readers", [1, 2, 9])
def test_every_reader_gets_everything_in_order(channel, num_readers):
    made = channel(num_readers)
    sender = made.sender()
    receivers = [made.receiver(i) for i in range(num_readers)]
    rng = random.Random(num_readers)
    records = [b"%d:" % i + rng.randbytes(rng.choice([0, 3, 60, 900, 9000])) for i in range(200)]
    assert carry(sender, receivers, records) == [records] * num_readers


def test_what_was_sent_before_the_reader_opened_arrives(channel):
    made = channel()
    sender = made.sender()
    assert sender.try_send(b"early")
    assert made.receiver().receive(SOON) == b"early"


# Rule 2: blocking and deadlines.


def test_receiving_nothing_times_out_with_the_edge(channel):
    made = channel()
    made.sender()
    receiver = made.receiver()
    assert receiver.try_receive() is None
    start = time.monotonic()
    with pytest.raises(
        ChannelTimeout, match=r"writer\.0>readers: nothing received for \d+\.\d{3} s"
    ):
        receiver.receive(0.03)
    assert 0.03 <= time.monotonic() - start < SOON / 2


def test_a_full_channel_times_out_with_the_edge_and_the_laggard(channel):
    made = channel(num_readers=2)
    sender, idle, busy = made.sender(), made.receiver(0), made.receiver(1)
    count = fill(sender)
    for _ in range(count):
        busy.receive(SOON)
    busy.commit()
    start = time.monotonic()
    with pytest.raises(ChannelTimeout) as caught:
        sender.send(bytes(100), 0.03)
    assert 0.03 <= time.monotonic() - start < SOON / 2
    text = str(caught.value)
    assert re.match(r"writer\.0>readers: full for \d+\.\d{3} s; ", text)
    used = sender.stats().used
    assert f"reader 0 reader.0 (pid {os.getpid()}) is {used} bytes behind" in text
    assert "reader.1" not in text
    assert re.search(r"; full for \d+\.\d s; ", made.owner.describe())
    assert f"{used} of {CAPACITY} bytes, {count} records" in made.owner.describe()
    seconds, who = made.owner.full()
    assert 0.03 <= seconds < SOON
    assert who == f"reader 0 reader.0 (pid {os.getpid()}) is {used} bytes behind"
    idle.receive(SOON)
    idle.commit()
    sender.send(bytes(100), SOON)
    assert "full" not in made.owner.describe()
    assert made.owner.full() == (0.0, "")


def test_laggards_that_never_opened_are_named(channel):
    made = channel()
    sender = made.sender()
    assert "everything" in sender.laggards()
    fill(sender)
    assert "reader 0 reader.0 (not opened yet)" in sender.laggards()


# Rule 3: what was refused.


@pytest.mark.parametrize("size", [100, 3 * CAPACITY])
def test_a_refused_record_is_not_received_when_another_follows(channel, size):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    count = fill(sender)
    assert not sender.try_send(content(size))
    got = [receiver.receive(SOON) for _ in range(count)]
    receiver.commit()
    sender.send(b"another", SOON)
    assert receiver.receive(SOON) == b"another"
    assert got == [bytes(100)] * count


# Rules 4 and 5: commit, and the slowest reader.


def test_only_a_commit_makes_space(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    count = fill(sender)
    assert count > 10
    for _ in range(count):
        receiver.receive(SOON)
    assert not sender.try_send(bytes(100))
    receiver.commit()
    assert fill(sender) == count


def test_the_slowest_reader_bounds_the_writer(channel):
    made = channel(num_readers=3)
    sender, receivers = made.sender(), [made.receiver(i) for i in range(3)]
    for _ in range(fill(sender)):
        for receiver in receivers[:2]:
            receiver.receive(SOON)
            receiver.commit()
    assert not sender.try_send(bytes(100))
    receivers[2].receive(SOON)
    receivers[2].commit()
    assert fill(sender) == 1


def test_an_uncommitted_record_does_not_block_a_larger_one_for_good(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    large = content(2 * CAPACITY)
    assert sender.try_send(b"small")
    assert receiver.receive(SOON) == b"small"
    assert not sender.try_send(large)
    assert receiver.try_receive() is None
    receiver.commit()
    assert carry(sender, [receiver], [large]) == [[large]]


# Rule 6: sleeping.


def test_a_sleeping_receiver_is_woken(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    for i in range(3):
        assert receiver.arm()
        assert sender.try_send(b"%d" % i)
        while (record := receiver.try_receive()) is None:
            if receiver.arm():
                assert rung(receiver, SOON)
            receiver.disarm()
        assert record == b"%d" % i
        assert receiver.try_receive() is None


def test_a_receiver_with_something_to_do_does_not_sleep(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    assert sender.try_send(b"here")
    deadline = time.monotonic() + SOON
    while receiver.arm():
        assert time.monotonic() < deadline
        receiver.disarm()
    assert receiver.try_receive() == b"here"


def test_a_sleeping_sender_is_woken_by_a_commit(channel):
    made = channel(num_readers=2)
    sender, receivers = made.sender(), [made.receiver(i) for i in range(2)]
    for _ in range(3):
        fill(sender)
        assert sender.arm()
        for receiver in receivers:
            receiver.receive(SOON)
            assert not rung(sender) or receiver is receivers[1]
            receiver.commit()
        assert rung(sender, SOON)
        sender.disarm()
        assert not rung(sender)
        assert sender.try_send(bytes(100))


def test_a_sender_is_not_woken_by_a_commit_that_does_not_help(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    count = fill(sender)
    assert not sender.try_send(bytes(CAPACITY - 500))
    assert sender.arm()
    receiver.receive(SOON)
    receiver.commit()
    assert not rung(sender)
    for _ in range(count - 1):
        receiver.receive(SOON)
    receiver.commit()
    assert rung(sender, SOON)
    sender.disarm()
    assert sender.try_send(bytes(CAPACITY - 500))


def test_a_sender_with_something_to_do_does_not_sleep(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    assert not sender.arm()  # nothing was refused
    fill(sender)
    receiver.receive(SOON)
    receiver.commit()
    assert not sender.arm()  # there is space again
    assert sender.try_send(bytes(100))
    assert not sender.arm()


def test_a_large_record_goes_through_arm_and_bell(channel):
    """What an outbox does: offer the same payload again whenever the bell says so."""
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    large = content(10 * CAPACITY)
    assert sender.try_send(b"first")
    rounds, sent, got = 0, sender.try_send(large), []
    while not sent:
        rounds += 1
        assert sender.arm()
        while (record := receiver.try_receive()) is not None or not got:
            got += [record] if record is not None else []
        receiver.commit()
        assert rung(sender, SOON)
        sender.disarm()
        sent = sender.try_send(large)
    assert rounds > 0
    assert got == [b"first"]
    assert receiver.receive(SOON) == large


@pytest.mark.parametrize("size", [0, 100, 3 * CAPACITY])
def test_no_wake_up_is_lost_between_threads_that_always_sleep(channel, size):
    made = channel(num_readers=2)
    sender, receivers = made.sender(), [made.receiver(i) for i in range(2)]
    payload, count = content(size), 600 if size <= CAPACITY else 60
    got = [0, 0]

    def read(index):
        receiver = receivers[index]
        receiver.spin_seconds = 0.0
        for _ in range(count):
            assert receiver.receive(SOON) == payload
            receiver.commit()
            got[index] += 1

    threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    sender.spin_seconds = 0.0
    for _ in range(count):
        sender.send(payload, SOON)
    for thread in threads:
        thread.join()
    assert got == [count, count]
    assert sender.stats().used == 0


# Rule 7: death.


def test_a_dead_reader_is_an_error_at_once(channel):
    made = channel(num_readers=2)
    sender, receiver = made.sender(), made.receiver(1)
    made.owner.mark_dead("reader.1")
    with pytest.raises(PeerDeadError, match=rf"readers: reader\.1 \(pid {os.getpid()}\) is dead"):
        sender.try_send(b"lost")
    with pytest.raises(PeerDeadError):
        sender.send(b"lost", SOON)
    made.owner.mark_dead("reader.0")
    with pytest.raises(PeerDeadError, match=r"reader\.0 .*, reader\.1 "):
        sender.try_send(b"lost")
    made.owner.mark_alive("reader.0")
    with pytest.raises(PeerDeadError):
        sender.try_send(b"lost")
    made.owner.mark_alive("reader.1")
    assert sender.try_send(b"kept")
    assert receiver.receive(SOON) == b"kept"


def test_a_dead_writer_is_an_error_after_its_last_record(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    for i in range(3):
        assert sender.try_send(b"%d" % i)
    made.owner.mark_dead("writer.0")
    assert [receiver.receive(SOON) for _ in range(3)] == [b"0", b"1", b"2"]
    for _ in range(2):
        with pytest.raises(PeerDeadError, match=r"writer\.0 \(pid \d+\) is dead"):
            receiver.receive(SOON)
    made.owner.mark_alive("writer.0")
    assert receiver.try_receive() is None
    assert sender.try_send(b"3")
    assert receiver.receive(SOON) == b"3"


def test_death_wakes_whoever_sleeps(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    assert receiver.arm()
    made.owner.mark_dead("writer.0")
    assert rung(receiver, SOON)
    receiver.disarm()
    with pytest.raises(PeerDeadError):
        receiver.receive(SOON)
    fill(sender)
    assert sender.arm()
    made.owner.mark_dead("reader.0")
    assert rung(sender, SOON)
    sender.disarm()
    with pytest.raises(PeerDeadError):
        sender.try_send(b"")


def test_the_dead_do_not_let_anyone_fall_asleep(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    fill(sender)
    made.owner.mark_dead("reader.0")
    assert not sender.arm()
    made.owner.mark_alive("reader.0")
    assert sender.arm()
    sender.disarm()
    made.owner.mark_dead("writer.0")
    assert not receiver.arm()


def test_a_blocked_receive_ends_with_its_writer(channel):
    made = channel()
    made.sender()
    receiver = made.receiver()
    timer = threading.Timer(0.02, made.owner.mark_dead, ["writer.0"])
    timer.start()
    start = time.monotonic()
    with pytest.raises(PeerDeadError):
        receiver.receive(SOON)
    assert time.monotonic() - start < SOON / 2
    timer.join()


# Rule 8: closing.


def test_closing_twice_and_everything_after(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    for _ in range(2):
        sender.close()
        receiver.close()
    for call in (sender.arm, sender.disarm, sender.fileno, sender.stats, sender.laggards):
        with pytest.raises(ChannelClosed, match=r"writer\.0>readers: this sender is closed"):
            call()
    with pytest.raises(ChannelClosed):
        sender.try_send(b"")
    with pytest.raises(ChannelClosed):
        sender.send(b"", SOON)
    for call in (receiver.arm, receiver.disarm, receiver.fileno, receiver.stats, receiver.commit):
        with pytest.raises(ChannelClosed, match=r"writer\.0>readers: this receiver is closed"):
            call()
    with pytest.raises(ChannelClosed):
        receiver.try_receive()
    with pytest.raises(ChannelClosed):
        receiver.receive(SOON)


def test_closing_tells_the_other_side_nothing(channel, monkeypatch):
    # The sender may come before its reader, and then needs some 20 ms to find it.
    monkeypatch.setattr(zmq_channel, "LINGER_MS", 10_000)
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    assert sender.try_send(b"kept")
    sender.close()
    assert receiver.receive(SOON) == b"kept"
    assert receiver.try_receive() is None


def test_the_owner_may_close_first_and_twice(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    sender.send(b"met", SOON)
    assert receiver.receive(SOON) == b"met"
    for _ in range(2):
        made.owner.close()
    assert sender.try_send(b"kept")
    assert receiver.receive(SOON) == b"kept"


# Incarnations, resets and statistics.


def die(made, sender, receiver, reader=0):
    """What the supervisor and the writer do when a reader dies."""
    receiver.close()
    made.owner.mark_dead(f"reader.{reader}")
    with pytest.raises(PeerDeadError):
        sender.try_send(b"refused")


def reset(made, reader=0):
    made.owner.reset(f"reader.{reader}")
    made.owner.mark_alive(f"reader.{reader}")


def test_after_a_reset_a_reader_gets_what_is_sent_from_then_on(channel):
    made = channel(capacity=CAPACITY)
    sender, receiver = made.sender(), made.receiver()
    for life in range(4):
        for record in (b"committed", b"received", b"unread"):
            assert sender.try_send(record)
        assert receiver.receive(SOON) == b"committed"
        receiver.commit()
        assert receiver.receive(SOON) == b"received"
        die(made, sender, receiver)
        assert made.owner.stats().used > 0
        reset(made)
        assert made.owner.stats().used == 0
        early = [b"before it opened, %d" % life, content(1000), b""]
        for record in early:
            assert sender.try_send(record)
        receiver = made.receiver()
        assert sender.try_send(b"late")
        assert [receiver.receive(SOON) for _ in range(4)] == [*early, b"late"]
        receiver.commit()
        assert receiver.try_receive() is None
        assert made.owner.stats().used == 0


def test_without_a_reset_what_was_not_committed_comes_again(channel, transport):
    if transport == "zmq":
        return  # keeps nothing, and says so: test_zmq_channel.py
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    for record in (b"committed", b"received", b"unread"):
        assert sender.try_send(record)
    assert receiver.receive(SOON) == b"committed"
    receiver.commit()
    assert receiver.receive(SOON) == b"received"
    die(made, sender, receiver)
    made.owner.mark_alive("reader.0")
    receiver = made.receiver()
    assert [receiver.try_receive() for _ in range(3)] == [b"received", b"unread", None]


def test_a_reset_concerns_one_reader(channel):
    made = channel(num_readers=3)
    sender, receivers = made.sender(), [made.receiver(i) for i in range(3)]
    assert sender.try_send(b"old")
    die(made, sender, receivers[1], reader=1)
    reset(made, reader=1)
    assert sender.try_send(b"new")
    receivers[1] = made.receiver(1)
    assert receivers[1].receive(SOON) == b"new"
    for receiver in (receivers[0], receivers[2]):
        assert [receiver.receive(SOON) for _ in range(2)] == [b"old", b"new"]


def test_a_reset_makes_space_and_wakes_the_writer(channel):
    made = channel()
    sender = made.sender()
    count = fill(sender)
    made.owner.mark_dead("reader.0")
    made.owner.mark_alive("reader.0")
    assert sender.arm()
    sender.disarm()
    assert sender.arm()
    made.owner.reset("reader.0")
    assert rung(sender)
    sender.disarm()
    assert fill(sender) == count


def test_what_was_refused_is_forgotten_with_a_dead_reader(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    fill(sender)
    assert "full for" in made.owner.describe()
    die(made, sender, receiver)
    assert "full for" not in made.owner.describe()
    reset(made)
    assert not sender.arm()  # nothing is waited for


@pytest.mark.parametrize("met", [True, False])
def test_a_large_record_begins_anew_after_a_reset(channel, met):
    """Whether or not the writer was sending when the reader died."""
    made = channel(num_readers=2)
    sender, receivers = made.sender(), [made.receiver(i) for i in range(2)]
    large = content(10 * CAPACITY)
    assert sender.try_send(b"first")
    assert not sender.try_send(large)
    assert receivers[0].receive(SOON) == b"first"
    receivers[0].commit()
    assert receivers[0].try_receive() is None
    receivers[0].close()
    if met:
        made.owner.mark_dead("reader.0")
        with pytest.raises(PeerDeadError):
            sender.try_send(large)
    reset(made)
    receivers[0] = made.receiver()
    assert receivers[1].receive(SOON) == b"first"
    receivers[1].commit()
    assert carry(sender, receivers, [large, b"after"]) == [[large, b"after"]] * 2


def test_a_reset_is_for_readers(channel):
    with pytest.raises(ValueError, match="not in tuple"):
        channel().owner.reset("writer.0")


def test_progress_tells_who_stands_still(channel):
    made = channel(num_readers=2)
    sender, busy = made.sender(), made.receiver(0)
    assert made.owner.progress() == [("reader.0", 0, 0), ("reader.1", 0, 0)]
    for _ in range(2):
        assert sender.try_send(bytes(48))
    assert busy.receive(SOON) == bytes(48)
    assert made.owner.progress() == [("reader.0", 0, 128), ("reader.1", 0, 128)]
    busy.commit()
    assert made.owner.progress() == [("reader.0", 64, 128), ("reader.1", 0, 128)]
    made.owner.reset("reader.1")
    assert made.owner.progress() == [("reader.0", 64, 128), ("reader.1", 128, 128)]


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_deaths_and_resets(channel, seed):
    """Two readers; whoever dies is reset. What each gets is what was sent since its last reset."""
    rng, made = random.Random(seed), channel(num_readers=2)
    sender, receivers = made.sender(), [made.receiver(i) for i in range(2)]
    sent, at = 0, [0, 0]
    for _ in range(300):
        what, reader = rng.choice(["send", "send", "receive", "commit", "die", "new writer"]), 0
        if what == "send":
            sent += sender.try_send(b"%d" % sent + bytes(rng.choice([0, 30, 900])))
            continue
        reader = rng.randrange(2)
        if what == "receive" and at[reader] < sent:
            assert int(receivers[reader].receive(SOON).rstrip(b"\0")) == at[reader]
            at[reader] += 1
        elif what == "commit":
            receivers[reader].commit()
        elif what == "die" and rng.random() < 0.2:
            die(made, sender, receivers[reader], reader)
            reset(made, reader)
            at[reader] = sent
            receivers[reader] = made.receiver(reader)
        elif what == "new writer" and at == [sent, sent]:
            sender.close()
            sender = made.sender()
    for reader, receiver in enumerate(receivers):
        for number in range(at[reader], sent):
            assert int(receiver.receive(SOON).rstrip(b"\0")) == number
        receiver.commit()
    assert made.owner.stats().used == 0


def test_a_new_writer_goes_on(channel):
    made = channel()
    receiver = made.receiver()
    for i in range(3):
        sender = made.sender()
        sender.send(b"%d" % i, SOON)
        assert receiver.receive(SOON) == b"%d" % i
        sender.close()
    receiver.commit()
    assert made.owner.stats().records == 3


def test_statistics(channel):
    made = channel()
    sender, receiver = made.sender(), made.receiver()
    assert (sender.stats().used, sender.stats().records) == (0, 0)
    for _ in range(2):
        assert sender.try_send(bytes(48))
    assert receiver.receive(SOON) == bytes(48)
    used, stats = 2 * (48 + 16), sender.stats()
    assert (stats.capacity, stats.used, stats.records) == (CAPACITY, used, 2)
    assert made.owner.stats() == stats
    assert (receiver.stats().used, receiver.stats().records) == (used, 1)
    receiver.commit()
    assert (receiver.stats().used, sender.stats().used) == (used // 2, used // 2)
