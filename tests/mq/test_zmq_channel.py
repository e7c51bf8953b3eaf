"""What only the ZeroMQ channel does: it loses what was on its way to the dead, and says when."""

from __future__ import annotations

import os
import time

import pytest

from ringcast.mq import zmq_channel as module
from ringcast.mq.board import PUBLISHED
from ringcast.mq.endpoint import ChannelOwner
from ringcast.mq.errors import ConfigError, CorruptRecordError, PeerDeadError

SOON = 10.0


def fill(sender):
    count = 0
    while sender.try_send(bytes(100)):
        count += 1
    return count


def test_what_was_queued_for_the_dead_does_not_meet_the_living(zmq_channel):
    """Nobody has ever been connected, so the writer's socket still holds everything."""
    made = zmq_channel()
    sender, count = made.sender(), 3
    for _ in range(count):
        assert sender.try_send(b"old")
    made.owner.reset("reader.0")
    assert sender.try_send(b"new")
    receiver = made.receiver()
    assert receiver.receive(SOON) == b"new"
    assert receiver.try_receive() is None


def send_until_received(sender, receiver):
    """What is sent before ZeroMQ has noticed a death is lost as well."""
    while receiver.try_receive() is None:
        sender.send(b"more", SOON)
        time.sleep(0.002)


def test_without_a_reset_what_is_lost_is_told(zmq_channel):
    made = zmq_channel()
    sender, receiver = made.sender(), made.receiver()
    for record in (b"received", b"unread"):
        sender.send(record, SOON)
    assert receiver.receive(SOON) == b"received"
    receiver.close()
    successor = made.receiver()
    with pytest.raises(CorruptRecordError, match="reader 0 did and was not reset"):
        send_until_received(sender, successor)
    assert successor.receive(SOON) == b"more"
    successor.commit()


def frame(begin, payload):
    return (begin + 16 + len(payload)).to_bytes(8, "little") + payload


def test_what_is_older_than_what_has_come_is_dropped(zmq_channel):
    made = zmq_channel()
    sender, receiver = made.sender(), made.receiver()
    sender.send(b"1", SOON)
    assert receiver.receive(SOON) == b"1"
    sender._sockets[0].send(frame(0, b"1"))
    sender.send(b"2", SOON)
    assert receiver.receive(SOON) == b"2"
    receiver.commit()
    assert made.owner.stats().used == 0


def test_what_is_missing_is_an_error_once(zmq_channel):
    made = zmq_channel()
    sender, receiver = made.sender(), made.receiver()
    sender._publish(100)  # and died before it was sent
    successor = made.sender()
    successor.send(b"next", SOON)
    with pytest.raises(CorruptRecordError, match="100 bytes are lost"):
        receiver.receive(SOON)
    assert not receiver.arm()
    assert receiver.receive(SOON) == b"next"
    receiver.commit()
    assert made.owner.stats().used == 0


def test_what_never_came_from_a_dead_writer_counts_as_received(zmq_channel):
    made = zmq_channel()
    sender, receiver = made.sender(), made.receiver()
    sender._publish(100)
    made.owner.mark_dead("writer.0")
    with pytest.raises(PeerDeadError):
        receiver.receive(SOON)
    assert made.owner.progress() == [("reader.0", 100, 100)]
    made.owner.mark_alive("writer.0")
    made.sender().send(b"next", SOON)
    assert receiver.receive(SOON) == b"next"


def test_what_a_dead_writer_held_counts_as_committed(zmq_channel):
    made = zmq_channel()
    sender = made.sender()
    count = fill(sender)
    successor = made.sender()
    assert fill(successor) == count


def test_the_end_of_a_dead_writer_is_when_nothing_more_comes(zmq_channel):
    made = zmq_channel()
    sender, receiver = made.sender(), made.receiver()
    sender.send(b"arrived", SOON)
    made.owner._board.words[PUBLISHED] += 100  # published, and died with its process
    made.owner.mark_dead("writer.0")
    assert receiver.receive(SOON) == b"arrived"
    start = time.monotonic()
    with pytest.raises(PeerDeadError):
        receiver.receive(SOON)
    assert module.QUIET <= time.monotonic() - start < 1.0


def test_a_dead_writer_of_whom_everything_has_come_is_an_error_at_once(zmq_channel, monkeypatch):
    monkeypatch.setattr(module, "QUIET", 1000.0)
    made = zmq_channel()
    sender, receiver = made.sender(), made.receiver()
    sender.send(b"last", SOON)
    made.owner.mark_dead("writer.0")
    assert receiver.receive(SOON) == b"last"
    with pytest.raises(PeerDeadError):
        receiver.try_receive()


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        ChannelOwner.create("zmq", "e", "w", ["r"], "Any", 4096, str(tmp_path))


def test_a_path_too_long_for_a_socket_is_refused(socket_folder):
    folder = os.path.join(socket_folder, "x" * 100)
    with pytest.raises(ConfigError, match="at most 95 bytes"):
        ChannelOwner.create("zmq", "e", "w", ["r"], "Any", 4096, folder)


def test_the_owner_removes_the_sockets_of_the_dead(socket_folder):
    owner = ChannelOwner.create("zmq", "e", "w", ["r", "s"], "Any", 4096, socket_folder)
    for end in (".0.0", ".0.1", ".1.0"):
        with open(owner.address + end, "w"):
            pass
    owner.close()
    assert os.listdir(socket_folder) == []


def test_closing_is_bounded_when_nobody_reads(zmq_channel):
    sender = zmq_channel().sender()
    assert sender.try_send(b"for nobody")
    start = time.monotonic()
    sender.close()
    assert time.monotonic() - start < 5.0
