"""What only the ring promises: wrap-around, large positions, parts, incarnations, sanity."""

from __future__ import annotations

import random
import select

import pytest

from ringcast.mq.board import CURSORS, PUBLISHED, Board
from ringcast.mq.endpoint import open_receiver
from ringcast.mq.errors import ConfigError, CorruptRecordError, PeerDeadError
from ringcast.mq.segment import Segment

CAPACITY = 1024
LARGE = random.Random(1).randbytes(3 * CAPACITY)


def rung(end):
    return bool(select.select([end], [], [], 0)[0])


def words_of(made):
    """The shared words behind a channel, to look at and to spoil."""
    return made.owner._board.words


@pytest.mark.parametrize("start", range(0, CAPACITY, 16))
def test_wrap_around_at_every_offset(ring, start):
    made = ring(capacity=CAPACITY, start=2**32 - CAPACITY + start)
    sender, receiver = made.sender(), made.receiver()
    for size in (0, 16, 1, 700, 1008, 33, len(LARGE)):
        payload = LARGE[:size]
        sent = sender.try_send(payload)
        while (got := receiver.try_receive()) is None:
            sent = sender.try_send(payload)
        assert sent
        assert got == payload
        receiver.commit()
    assert words_of(made)[PUBLISHED] > 2**32


@pytest.mark.parametrize("start", [2**32 - 64, 2**53 - 64, 2**63 - 64, 2**64 - 10**6])
def test_positions_grow_beyond_every_power(ring, start):
    made = ring(num_readers=2, capacity=CAPACITY, start=start // 16 * 16)
    sender, receivers = made.sender(), [made.receiver(i) for i in range(2)]
    for i in range(500):
        sender.send(b"%d" % i, 1.0)
        for receiver in receivers:
            assert receiver.try_receive() == b"%d" % i
            receiver.commit()
    assert made.owner.stats().used == 0


def test_an_ordinary_record_may_fill_the_ring(ring):
    made = ring(capacity=CAPACITY)
    sender, receiver = made.sender(), made.receiver()
    assert sender.try_send(LARGE[: CAPACITY - 16])
    assert sender.stats().used == CAPACITY
    assert not sender.try_send(b"")
    receiver.try_receive()
    receiver.commit()
    assert sender.try_send(b"")


def test_space_and_bells_cost_no_call_while_nobody_sleeps(ring):
    made = ring(capacity=CAPACITY)
    sender, receiver = made.sender(), made.receiver()
    assert sender.try_send(b"1")
    receiver.try_receive()
    receiver.commit()
    assert not any(bell.drain() for bell in made.owner.bells)


def test_a_bell_rings_until_it_is_disarmed(ring):
    made = ring()
    sender, receiver = made.sender(), made.receiver()
    assert receiver.arm()
    assert not rung(receiver)
    assert sender.try_send(b"1")
    assert rung(receiver)
    assert rung(receiver)
    receiver.disarm()
    assert not rung(receiver)
    assert sender.try_send(b"2")
    assert not rung(receiver)


def test_a_writer_that_woke_is_not_rung(ring):
    made = ring(capacity=CAPACITY)
    sender, receiver = made.sender(), made.receiver()
    assert sender.try_send(bytes(1000))
    assert not sender.try_send(b"")
    assert sender.arm()
    sender.disarm()
    receiver.try_receive()
    receiver.commit()
    assert not rung(sender)


def test_only_readers_that_sleep_are_rung(ring):
    made = ring(num_readers=10)
    sender, receivers = made.sender(), [made.receiver(i) for i in range(10)]
    asleep = [1, 7, 8, 9]
    assert all(receivers[i].arm() for i in asleep)
    assert sender.try_send(b"wake")
    writer_bell, *bells = made.owner.bells
    assert [i for i, bell in enumerate(bells) if bell.drain()] == asleep
    assert not writer_bell.drain()


# Incarnations


def test_a_new_reader_gets_again_what_was_not_committed(ring):
    made = ring(num_readers=2)
    sender, first = made.sender(), made.receiver()
    for i in range(4):
        assert sender.try_send(b"%d" % i)
    assert [first.try_receive() for _ in range(2)] == [b"0", b"1"]
    first.commit()
    assert first.try_receive() == b"2"
    assert first.arm() is False
    second = made.receiver()
    assert [second.try_receive() for _ in range(3)] == [b"2", b"3", None]


def test_a_new_reader_is_awake(ring):
    made = ring()
    sender, first = made.sender(), made.receiver()
    assert first.arm()
    made.receiver()
    assert sender.try_send(b"")
    assert not made.owner.bells[1].drain()


def test_what_a_killed_writer_had_not_published_is_invisible(ring):
    made = ring()
    sender, receiver = made.sender(), made.receiver()
    assert sender.try_send(b"whole")
    sender._write(b"half", 4, 3)  # killed before it published
    successor = made.sender()
    assert receiver.try_receive() == b"whole"
    assert receiver.try_receive() is None
    assert successor.try_send(b"next")
    assert receiver.try_receive() == b"next"


def test_a_new_writer_is_not_waiting(ring):
    made = ring(capacity=CAPACITY)
    sender, receiver = made.sender(), made.receiver()
    assert sender.try_send(bytes(1000))
    assert not sender.try_send(b"")
    assert sender.arm()
    made.sender()
    receiver.try_receive()
    receiver.commit()
    assert not made.owner.bells[0].drain()
    assert "full" not in made.owner.describe()


# Records in parts


def start_large(made):
    """A large record of which a part is on its way: sender, receiver."""
    sender, receiver = made.sender(), made.receiver()
    assert not sender.try_send(LARGE)
    assert sender.stats().used == CAPACITY
    return sender, receiver


def test_parts_are_forgotten_when_the_sender_turns_to_another_record(ring):
    sender, receiver = start_large(ring(capacity=CAPACITY))
    assert receiver.try_receive() is None
    assert sender.try_send(b"another")
    assert [receiver.try_receive(), receiver.try_receive()] == [b"another", None]
    assert receiver.stats().records == sender.stats().records == 1


def test_a_large_record_that_was_given_up_can_be_sent_anew(ring):
    sender, receiver = start_large(ring(capacity=CAPACITY))
    assert receiver.try_receive() is None
    assert sender.try_send(b"another")
    got = []
    while not sender.try_send(LARGE):
        while (record := receiver.try_receive()) is not None:
            got.append(record)
        receiver.commit()
    assert [*got, receiver.try_receive()] == [b"another", LARGE]


def test_parts_are_forgotten_when_another_large_record_follows(ring):
    sender, receiver = start_large(ring(capacity=CAPACITY))
    other = LARGE[::-1]
    while not sender.try_send(other):
        assert receiver.try_receive() is None
    assert receiver.try_receive() == other


def test_parts_are_forgotten_with_their_writer(ring):
    made = ring(capacity=CAPACITY)
    _, receiver = start_large(made)
    made.owner.mark_dead("writer.0")
    with pytest.raises(PeerDeadError):
        receiver.try_receive()
    made.owner.mark_alive("writer.0")
    assert made.sender().try_send(b"new")
    assert receiver.try_receive() == b"new"


def test_parts_of_a_dead_writer_are_forgotten_by_a_reader_that_was_not_told(ring):
    made = ring(capacity=CAPACITY)
    _, receiver = start_large(made)
    assert receiver.try_receive() is None
    assert made.sender().try_send(b"new")
    assert receiver.try_receive() == b"new"


def test_a_large_record_whose_beginning_died_with_a_reader_is_an_error_once(ring):
    made = ring(num_readers=2, capacity=CAPACITY)
    sender, receiver = start_large(made)
    other = made.receiver(1)
    assert receiver.try_receive() is None  # the first parts are committed now
    receiver.close()
    receiver, got = made.receiver(), []
    while not sender.try_send(LARGE):
        got.append(other.try_receive())
        assert receiver.try_receive() is None
    assert sender.try_send(b"after")
    with pytest.raises(CorruptRecordError, match="reader 0 died after it had received a part"):
        receiver.try_receive()
    assert receiver.try_receive() == b"after"
    assert [other.try_receive(), other.try_receive()] == [LARGE, b"after"]


def test_parts_wait_for_the_commit_of_what_came_before(ring):
    made = ring(capacity=CAPACITY)
    sender, first = made.sender(), made.receiver()
    assert sender.try_send(b"before")
    assert not sender.try_send(LARGE)
    assert first.try_receive() == b"before"
    assert first.try_receive() is None
    second = made.receiver()  # the first has died without a commit
    assert second.try_receive() == b"before"
    second.commit()
    while not sender.try_send(LARGE):
        assert second.try_receive() is None
    assert second.try_receive() == LARGE


# Sanity


def test_what_is_no_record_is_an_error(ring):
    made = ring(capacity=CAPACITY)
    sender, receiver = made.sender(), made.receiver()
    assert sender.try_send(b"spoiled")
    header = CURSORS + 8
    words_of(made)[header] ^= 1
    for _ in range(2):
        with pytest.raises(CorruptRecordError, match="what is at position 0 is no record"):
            receiver.try_receive()
    words_of(made)[header] ^= 1
    words_of(made)[header + 1] = 1 << 40 | 3  # larger than all that was published
    with pytest.raises(CorruptRecordError):
        receiver.try_receive()


def test_memory_that_is_no_channel_is_refused():
    segment = Segment.create(4096)
    try:
        with pytest.raises(CorruptRecordError, match="no channel"):
            Board(segment.memory)
    finally:
        segment.close()


@pytest.mark.parametrize("num_readers", [0, 65])
def test_too_many_readers_are_refused(num_readers):
    with pytest.raises(ConfigError, match=rf"1 to 64 readers, not {num_readers}"):
        Board.format(bytearray(8192), CAPACITY, num_readers)


@pytest.mark.parametrize("num_readers", range(1, 65))
def test_any_number_of_readers(ring, num_readers):
    made = ring(num_readers, capacity=CAPACITY, start=2**32 - 32)
    sender, receivers = made.sender(), [made.receiver(i) for i in range(num_readers)]
    payloads, got = [b"1", LARGE, b"", LARGE[:900]], [[] for _ in receivers]
    left = list(payloads)
    while left or len(got[-1]) < len(payloads):
        while left and sender.try_send(left[0]):
            left.pop(0)
        for receiver, records in zip(receivers, got, strict=True):
            while (record := receiver.try_receive()) is not None:
                records.append(record)
            receiver.commit()
    assert got == [payloads] * num_readers
    assert not sender.try_send(LARGE)  # nobody reads
    late = [f"reader {i} reader.{i} " in sender.laggards() for i in range(num_readers)]
    assert late == [True] * num_readers


def test_the_last_of_sixty_four_readers(ring):
    made = ring(num_readers=64)
    sender, receivers = made.sender(), [made.receiver(i) for i in range(64)]
    assert receivers[63].arm()
    assert sender.try_send(b"all")
    assert made.owner.bells[64].drain()
    assert [receiver.try_receive() for receiver in receivers] == [b"all"] * 64
    made.owner.mark_dead("reader.63")
    with pytest.raises(PeerDeadError, match=r"reader\.63"):
        sender.try_send(b"")


def test_an_endpoint_can_be_opened_after_its_owner_closed_one_end(ring):
    made = ring()
    endpoint = made.owner.endpoint("reader.0")
    for _ in range(2):
        receiver = open_receiver(endpoint)
        assert receiver.try_receive() is None
        receiver.close()
