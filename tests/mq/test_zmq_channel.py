"""What only the ZeroMQ channel does: it loses what was on its way to the dead, and says when."""

from __future__ import annotations

import os
import select
import time

import pytest

from ringcast.mq import zmq_channel as module
from ringcast.mq.board import CURSORS, PUBLISHED
from ringcast.mq.endpoint import ChannelOwner
from ringcast.mq.errors import ConfigError, PeerDeadError

SOON = 10.0


def fill(sender):
    count = 0
    while sender.try_send(bytes(100)):
        count += 1
    return count


def test_what_a_dead_reader_held_counts_as_committed(zmq_channel):
    made = zmq_channel()
    sender, receiver = made.sender(), made.receiver()
    count = fill(sender)
    receiver.receive(SOON)
    assert sender.arm()
    receiver.close()
    made.receiver()
    assert select.select([sender], [], [], SOON)[0]
    sender.disarm()
    assert fill(sender) == count


def test_a_new_reader_goes_on(zmq_channel):
    made = zmq_channel()
    sender, receiver = made.sender(), made.receiver()
    sender.send(b"met", SOON)
    assert receiver.receive(SOON) == b"met"
    receiver.close()
    successor, sent = made.receiver(), 0
    # What goes to the old connection before ZeroMQ notices its end is lost.
    while (got := successor.try_receive()) is None:
        sender.send(b"%d" % sent, SOON)
        sent += 1
        time.sleep(0.002)
    for number in range(int(got) + 1, sent):
        assert successor.receive(SOON) == b"%d" % number
    assert sent < SOON / 0.002


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


def test_a_commit_never_goes_back(zmq_channel):
    made = zmq_channel()
    sender, words = made.sender(), made.owner._board.words
    words[CURSORS + 1] = 4242  # another process has been this reader
    for _ in range(2):
        assert sender.try_send(b"queued")
    successor = made.receiver()  # counts them as committed, and gets them nevertheless
    for _ in range(2):
        assert successor.receive(SOON) == b"queued"
        successor.commit()
        assert words[CURSORS] == 2 * (6 + 16)


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        ChannelOwner.create("zmq", "e", "w", ["r"], "Any", 4096, str(tmp_path))


def test_a_path_too_long_for_a_socket_is_refused(socket_folder):
    folder = os.path.join(socket_folder, "x" * 100)
    with pytest.raises(ConfigError, match="at most 100 bytes"):
        ChannelOwner.create("zmq", "e", "w", ["r"], "Any", 4096, folder)


def test_the_owner_removes_the_sockets_of_the_dead(socket_folder):
    owner = ChannelOwner.create("zmq", "e", "w", ["r", "s"], "Any", 4096, socket_folder)
    with open(owner.address + ".0", "w"):
        pass
    owner.close()
    assert os.listdir(socket_folder) == []


def test_closing_is_bounded_when_nobody_reads(zmq_channel):
    sender = zmq_channel().sender()
    assert sender.try_send(b"for nobody")
    start = time.monotonic()
    sender.close()
    assert time.monotonic() - start < 5.0
